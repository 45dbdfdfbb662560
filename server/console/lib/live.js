// What the server is doing, kept up to date from /v1/stats and /v1/events.

const MINUTES = 15;
const MAX_SAMPLES = MINUTES * 60;
const MAX_REQUESTS = 200;
const BUSY_MS = 1000;
const IDLE_MS = 4000;
const TITLE_MS = 3000;
const ANSWER_MS = 15000;
/** In the order in which a request goes through them. */
const PHASES = ["waiting", "prefill", "decode", "ended"];

export class Live {
  constructor(api) {
    this.api = api;
    this.stats = null;
    this.error = null;
    /** Latest requests by id, the oldest first. */
    this.requests = new Map();
    this.samples = [];
    this.marks = [];
    this.past = null;
    this.speeds = new Map();
    this.changes = 0;
    this.lastId = null;
    this.listeners = new Set();
    this.queued = false;
    this.isLooking = false;
    this.isWanted = false;
  }

  start() {
    this.load();
    this.poll();
    this.listen();
    document.addEventListener("visibilitychange", () => (document.hidden ? this.leaving?.abort() : this.poll()));
  }

  /** Reads what was before: requests, and what the last minutes' charts are drawn from. */
  async load() {
    try {
      const { data, levels } = await this.api.get("v1/requests", { timeout: ANSWER_MS });
      for (const one of data.slice(0, MAX_REQUESTS).reverse()) {
        const known = this.requests.get(one.id);
        if (known?.ended) {
          known.title ||= one.title;
          continue;
        }
        // An event may have told more than this answer, which was on its way.
        const phase = PHASES.findLast((name) => name === known?.phase || name === (one.ended ? "ended" : one.phase)) ?? "waiting";
        const fields = { started: one.queue_ms === undefined ? undefined : one.received + one.queue_ms / 1000, ...one, phase };
        this.requests.set(one.id, Object.assign(known ?? {}, fields));
      }
      this.past = { requests: data, levels };
      this.fill();
      this.changed();
    } catch {
      // Stats say what is wrong.
    }
  }

  /** Puts samples of the time before the page before its first own one, once both are known. */
  fill() {
    const [first] = this.samples;
    if (!this.past || !first) return;
    const { requests, levels } = this.past;
    this.past = null;
    const earlier = samplesOf(requests, levels, first);
    this.samples = [...earlier, ...this.samples];
  }

  /** Has `listener` called after each change, at most once a frame; returns what ends that. */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  changed() {
    if (this.queued) return;
    this.queued = true;
    setTimeout(() => {
      this.queued = false;
      for (const listener of [...this.listeners]) listener();
    }, 100);
  }

  /** Looks now, or once more after the look that is under way. */
  async poll() {
    clearTimeout(this.timer);
    this.isWanted = true;
    if (this.isLooking) return;
    this.isLooking = true;
    while (this.isWanted) {
      this.isWanted = false;
      await this.look();
    }
    this.isLooking = false;
    const isBusy = this.stats?.requests.length || this.stats?.loading.length;
    this.timer = setTimeout(() => this.poll(), document.hidden ? 5 * IDLE_MS : isBusy ? BUSY_MS : IDLE_MS);
  }

  async look() {
    try {
      this.take(await this.api.get("v1/stats", { timeout: ANSWER_MS }));
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    this.changed();
  }

  /** Whether nobody answers, and what is shown is of the past. */
  get isGone() {
    return this.error instanceof TypeError || this.error?.name === "TimeoutError";
  }

  take(stats) {
    const before = this.stats;
    this.stats = stats;
    if (before && stats.uptime_seconds < before.uptime_seconds) {
      this.samples = [];
      this.requests.clear();
      this.load();
    }
    this.measure(before, stats);
    const open = (one) => one.completion_tokens;
    const sample = {
      time: stats.time,
      completion: stats.totals.completion_tokens + sum(stats.requests, open),
      evaluated: stats.totals.evaluated_tokens + sum(stats.requests, (one) => one.evaluated_tokens),
      cached: stats.totals.cached_tokens,
      prompt: stats.totals.prompt_tokens,
      saved: stats.totals.saved_seconds,
      live: sum(stats.models, (one) => one.cache.live_bytes),
      memory: sum(stats.models, (one) => one.cache.stored_bytes),
      disk: sum(stats.models, (one) => one.cache.disk_bytes),
    };
    this.samples.push(sample);
    this.fill();
    while (this.samples.length > MAX_SAMPLES || this.samples[0].time < sample.time - MINUTES * 60) this.samples.shift();
  }

  /** Keeps how fast each open request decodes, from the difference between two looks. */
  measure(before, stats) {
    const old = new Map((before?.requests ?? []).map((one) => [one.id, one]));
    const passed = before ? stats.time - before.time : 0;
    const speeds = new Map();
    for (const one of stats.requests) {
      const was = old.get(one.id);
      if (was && passed > 0) {
        const now = (one.completion_tokens - was.completion_tokens) / passed;
        const known = this.speeds.get(one.id);
        speeds.set(one.id, known === undefined ? now : 0.5 * known + 0.5 * now);
      }
    }
    this.speeds = speeds;
  }

  /** Returns how far a figure of the samples has grown within so many seconds. */
  grown(name, within) {
    const last = this.samples.at(-1);
    if (!last) return 0;
    const first = this.samples.find((one) => one.time >= last.time - within) ?? last;
    return last[name] - first[name];
  }

  /** A tab that is not shown gives its connection up: a browser has six for all tabs of a server. */
  async listen() {
    for (;;) {
      if (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
      this.leaving = new AbortController();
      try {
        const headers = this.lastId ? { "Last-Event-ID": this.lastId } : {};
        for await (const { data, id } of this.api.events("v1/events", { headers, signal: this.leaving.signal })) {
          if (id && !this.lastId) this.catchUp();
          if (id) this.lastId = id;
          if (data) this.note(JSON.parse(data));
        }
      } catch {
        // Stats say what is wrong; the stream is tried again.
      }
      await new Promise((done) => setTimeout(done, 2000));
    }
  }

  /** Looks at what no event has told, since it was before the first one or there were too many. */
  catchUp() {
    this.changes += 1;
    this.load();
    this.poll();
  }

  note(event) {
    const kind = event.type.split(".")[0];
    if (kind === "request") this.noteRequest(event);
    else if (kind === "lost") this.catchUp();
    else {
      this.changes += 1;
      this.marks.push({ ...event, at: performance.now() });
      if (this.marks.length > 200) this.marks.shift();
      if (kind === "model") this.poll();
    }
    this.changed();
  }

  noteRequest(event) {
    if (!this.requests.has(event.id) && event.type !== "request.queued") this.load();
    const known = this.requests.get(event.id) ?? { id: event.id, received: event.time };
    const { type, time, ...fields } = event;
    Object.assign(known, fields);
    if (type === "request.started") Object.assign(known, { started: time, phase: "prefill" });
    else if (type === "request.first_token") Object.assign(known, { first: time, first_ms: event.ms, phase: "decode" });
    else if (type === "request.ended") {
      Object.assign(known, { ended: time, phase: "ended" });
      known.received = time - event.total_ms / 1000;
      this.changes += 1;
      this.poll();
      // What a session is called is told with the list only.
      if (!known.title) this.loads ??= setTimeout(() => { this.loads = null; this.load(); }, TITLE_MS);
    } else if (type === "request.queued") {
      known.phase = "waiting";
      this.poll();
    }
    this.requests.set(event.id, known);
    while (this.requests.size > MAX_REQUESTS) this.requests.delete(this.requests.keys().next().value);
  }
}

const STEP = 5;

/** Returns samples of before `first`, whose sums are taken back request by request. */
function samplesOf(requests, levels, first) {
  const from = first.time - MINUTES * 60;
  const spans = requests.map((one) => {
    const began = one.received + ((one.queue_ms ?? 0) + (one.restore_ms ?? 0)) / 1000;
    const spoke = one.first_ms === undefined ? (one.ended ?? first.time) : one.received + one.first_ms / 1000;
    return { ...one, began, spoke, until: one.ended ?? first.time };
  });
  const done = (start, stop, time) => (time >= stop ? 1 : time <= start ? 0 : (time - start) / (stop - start));
  const sumsAt = (time) => ({
    completion: sum(spans, (one) => (one.completion_tokens ?? 0) * done(one.spoke, one.until, time)),
    evaluated: sum(spans, (one) => (one.evaluated_tokens ?? 0) * done(one.began, one.spoke, time)),
    cached: sum(spans, (one) => (one.ended && one.ended <= time ? (one.cached_tokens ?? 0) : 0)),
    saved: sum(spans, (one) => (one.ended && one.ended <= time ? (one.saved_seconds ?? 0) : 0)),
    prompt: sum(spans, (one) => (one.ended && one.ended <= time ? (one.prompt_tokens ?? 0) : 0)),
  });
  const last = sumsAt(first.time);
  const oldest = Math.max(from, Math.min(first.time, ...spans.map((one) => one.received), ...levels.map(([time]) => time)));
  const samples = [];
  for (let time = oldest; time < first.time - 1; time += STEP) {
    const sums = sumsAt(time);
    const [, live, memory, disk] = levels.findLast(([at]) => at <= time) ?? levels[0] ?? [0, first.live, first.memory, first.disk];
    samples.push({ ...first, time, live, memory, disk, ...Object.fromEntries(Object.keys(sums).map((name) => [name, first[name] - last[name] + sums[name]])) });
  }
  return samples;
}

export function sum(list, value) {
  return list.reduce((total, one) => total + value(one), 0);
}
