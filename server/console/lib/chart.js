// A small chart of the last minutes, drawn as SVG.

import { h, s } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 64;

/** `series` are `{name, color, values}`, each value `[time, number]`; `text` formats a number. Stacks them if asked. */
export function chart(title, series, { text, minutes = 15, stacked = false, now }) {
  const first = Math.min(now - 60, ...series.flatMap(({ values }) => values.slice(0, 1).map(([time]) => time)));
  const from = Math.max(now - minutes * 60, first);
  const sums = new Map();
  const drawn = series.map(({ name, color, values }) => {
    const points = values.filter(([time]) => time >= from);
    const tops = points.map(([time, value]) => {
      const base = stacked ? (sums.get(time) ?? 0) : 0;
      sums.set(time, base + value);
      return [time, base, base + value];
    });
    return { name, color, tops, last: points.at(-1)?.[1] ?? 0 };
  });
  const most = Math.max(1e-9, ...drawn.flatMap((one) => one.tops.map(([, , top]) => top)));
  const x = (time) => (((time - from) / (now - from)) * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - 2 - (value / most) * (HEIGHT - 6)).toFixed(1);
  const said = drawn.map((one) => `${one.name ? `${one.name} ` : ""}${text(one.last)}`).join(", ");
  return h(
    "figure",
    { class: "chart" },
    h("figcaption", {}, h("span", {}, title), h("b", {}, drawn.length === 1 ? text(drawn[0].last) : `max ${text(most)}`)),
    s(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${said}` },
      drawn.map(({ color, tops }) => {
        if (tops.length < 2) return null;
        const up = tops.map(([time, , top]) => `${x(time)},${y(top)}`).join(" ");
        const down = tops.map(([time, base]) => `${x(time)},${y(base)}`).reverse().join(" ");
        return [
          s("polygon", { points: `${up} ${down}`, class: `area ${color}` }),
          s("polyline", { points: up, class: `line ${color}`, "vector-effect": "non-scaling-stroke" }),
        ];
      }),
    ),
    drawn.length > 1 &&
      h("p", { class: "legend" }, drawn.map((one) => h("span", { class: one.color }, `${one.name} ${text(one.last)}`))),
  );
}
