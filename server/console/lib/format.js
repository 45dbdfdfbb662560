// Figures as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(number) {
  let unit = 0;
  let value = number ?? 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** Groups digits: 12 345. */
export function count(number) {
  return Math.round(number ?? 0).toString().replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

/** A figure with its noun: 1 edge, 12 edges. */
export function counted(number, noun) {
  return `${count(number)} ${noun}${Math.round(number ?? 0) === 1 ? "" : "s"}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  // Rounded before it is divided: no `9 min 60 s`.
  const [whole, minutes] = [Math.round(value), Math.round(value / 60)];
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${(value / 86400).toFixed(1)} days`;
}

export function ms(value) {
  return value === null || value === undefined ? "–" : seconds(value / 1000);
}

export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  return `${share > 0.995 && share < 1 ? 99 : Math.round(share * 100)}\u00a0%`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}

export function ago(time, now = Date.now() / 1000) {
  const gone = Math.max(0, now - time);
  return gone < 2 ? "now" : `${seconds(gone < 60 ? Math.round(gone) : gone).replace(".0", "").replace(/(\d) /g, "$1\u00a0")} ago`;
}

export function rate(value) {
  return `${value >= 100 ? Math.round(value) : value.toFixed(1)} tokens/s`;
}

/** The address of a session's page. */
export function sessionLink(id, namespace) {
  return `#/sessions/${encodeURIComponent(id)}${namespace ? `/${encodeURIComponent(namespace)}` : ""}`;
}
