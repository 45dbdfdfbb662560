// The server, asked with the key that the visitor has given once.

const KEY = "mlx-serve-key";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  /** `askForKey(message)` resolves to a key, or to null where the visitor gives none. */
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.asking = null;
    /** Whether the visitor would not give a key: nothing asks again until that is taken back. */
    this.isDeclined = false;
  }

  get key() {
    return sessionStorage.getItem(KEY);
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  /**
   * Returns the answer; asks for a key where one is needed. Throws ApiError, TypeError where nobody answers, and
   * TimeoutError where the server takes longer than `timeout` ms; the time in which a key is asked for does not count.
   */
  async fetch(path, { method = "GET", body, signal, timeout, headers = {} } = {}) {
    for (;;) {
      const used = this.key;
      const sent = { ...headers };
      if (used) sent.Authorization = `Bearer ${used}`;
      if (body !== undefined) sent["Content-Type"] = "application/json";
      const answer = await fetch(new URL(path, document.baseURI), {
        method,
        signal: timeout ? AbortSignal.timeout(timeout) : signal,
        headers: sent,
        body: body === undefined ? undefined : JSON.stringify(body),
      });
      if (answer.status === 401 && (await this.otherKey(used))) continue;
      if (!answer.ok) throw await errorOf(answer);
      return answer;
    }
  }

  /** Returns whether there is another key now than the one that was refused. */
  async otherKey(refused) {
    if (this.key !== refused) return true;
    if (this.isDeclined) return false;
    this.asking ??= this.askForKey(refused ? "The server does not know this key." : "This server asks for a key.");
    const given = await this.asking;
    this.asking = null;
    this.isDeclined = !given;
    if (!given) return false;
    this.key = given;
    return true;
  }

  async get(path, options) {
    return (await this.fetch(path, options)).json();
  }

  async post(path, body = {}, options) {
    return (await this.fetch(path, { ...options, method: "POST", body })).json();
  }

  async del(path) {
    return (await this.fetch(path, { method: "DELETE" })).json();
  }

  /** Yields `{event, data, id}` of a stream of server-sent events; `data` is text. */
  async *events(path, options) {
    let found = { event: "message", data: [], id: null };
    for await (const line of this.lines(path, options)) {
      if (line === "") {
        if (found.data.length || found.id) yield { ...found, data: found.data.join("\n") };
        found = { event: "message", data: [], id: null };
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") found.data.push(value);
      else if (field === "event") found.event = value;
      else if (field === "id") found.id = value;
    }
  }

  /** Yields the lines of an answer as they come. */
  async *lines(path, options) {
    const answer = await this.fetch(path, options);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) yield line.replace(/\r$/, "");
      }
      if (rest) yield rest;
    } finally {
      reader.cancel().catch(() => {});
    }
  }
}

/** Which answers count: none to a question that was given up, and none that comes after one to a later question. */
export class Questions {
  constructor() {
    this.last = 0;
    this.oldest = 0;
  }

  /** Begins a question; returns what says, once its answer has come, whether that counts. */
  begin() {
    const own = (this.last += 1);
    return () => {
      if (own < this.oldest) return false;
      this.oldest = own;
      return true;
    };
  }

  giveUp() {
    this.oldest = this.last + 1;
  }
}

async function errorOf(answer) {
  // The server's own words are for programs.
  if (answer.status === 401) return new ApiError(401, null, "This server asks for a key: “Give a key” is at the top of the page.");
  let error = {};
  try {
    const body = await answer.json();
    error = typeof body.error === "string" ? { message: body.error } : body.error ?? {};
  } catch {
    // What is no JSON is no answer of this server's own.
  }
  return new ApiError(answer.status, error.code ?? null, error.message ?? `The server answered ${answer.status}.`);
}

export function reasonOf(error) {
  return error instanceof TypeError ? "The server does not answer." : error.message;
}
