// Conversations and drafts in the browser: IndexedDB, or memory where a browser keeps nothing.

import { absorb, newId } from "./conversation.js";

const NAME = "mlx-serve";
const STORE = "conversations";
const PAGE = "mlx-serve-page";

export class Store {
  static async open() {
    try {
      const database = await new Promise((resolve, reject) => {
        const request = indexedDB.open(NAME, 1);
        request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
        request.onsuccess = () => resolve(request.result);
        request.onerror = request.onblocked = () => reject(request.error);
      });
      return new Store(database);
    } catch {
      return new Store(null);
    }
  }

  constructor(database) {
    this.database = database;
    this.memory = new Map();
    this.onchange = () => {};
    this.channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel(NAME);
    if (this.channel) this.channel.onmessage = ({ data }) => this.onchange(data);
    this.page = newId();
    this.before = sessionStorage.getItem(PAGE);
    sessionStorage.setItem(PAGE, this.page);
    // Held as long as the page is there: other pages tell by it whose drafts have been left behind.
    navigator.locks?.request(`${PAGE}/${this.page}`, () => new Promise(() => {}));
    this.takenOver = new Map();
  }

  /** Whether conversations outlive the page. */
  get keeps() {
    return this.database !== null;
  }

  async all() {
    const found = this.database ? await this.run("readonly", (store) => store.getAll()) : [...this.memory.values()];
    return found.filter((one) => one.nodes);
  }

  async get(id) {
    return (this.database ? await this.run("readonly", (store) => store.get(id)) : structuredClone(this.memory.get(id))) ?? null;
  }

  /** Keeps a conversation; it gets what other pages have kept of it meanwhile, and `change` is made in the same step. */
  async put(conversation, change = () => {}) {
    const join = (known) => {
      if (known) absorb(conversation, known);
      change();
    };
    if (this.database) {
      await this.run("readwrite", (store) => {
        const asked = store.get(conversation.id);
        asked.onsuccess = () => {
          join(asked.result);
          store.put(conversation);
        };
        return asked;
      });
    } else {
      join(null);
      this.memory.set(conversation.id, structuredClone(conversation));
    }
    this.channel?.postMessage(conversation.id);
  }

  async remove(id) {
    if (this.database) await this.run("readwrite", (store) => store.delete(id));
    else this.memory.delete(id);
    this.channel?.postMessage(id);
  }

  /** Returns the newest draft of `key` that this page, or one that is gone, has left; null without one. */
  async draft(key) {
    if (!this.database) return null;
    const found = await this.run("readonly", (store) => store.getAll(IDBKeyRange.bound(`draft/${key}/`, `draft/${key}/\uffff`)));
    const alive = new Set((await navigator.locks?.query())?.held.map(({ name }) => name.slice(PAGE.length + 1)));
    const left = found.filter(({ page }) => page === this.page || page === this.before || !alive.has(page));
    this.takenOver.set(key, left.map(({ id }) => id).filter((id) => !id.endsWith(this.page)));
    return left.sort((a, b) => b.at - a.at)[0] ?? null;
  }

  /** Keeps what is being written, with a conversation that has not begun; no text is no draft. */
  async keepDraft(key, text, conversation = null, files = []) {
    if (!this.database) return;
    const draft = { id: `draft/${key}/${this.page}`, page: this.page, at: Date.now(), text, files, conversation };
    const others = this.takenOver.get(key) ?? [];
    await this.run("readwrite", (store) => {
      for (const id of others) store.delete(id);
      return text || conversation || files.length ? store.put(draft) : store.delete(draft.id);
    });
    this.takenOver.delete(key);
  }

  /** Returns what is kept under names of its own: presets of settings. */
  async presets() {
    if (!this.database) return [...this.memory.values()].filter((one) => one.preset);
    return this.run("readonly", (store) => store.getAll(IDBKeyRange.bound("preset/", "preset/\uffff")));
  }

  /** Keeps a preset, or forgets it where it is null. */
  async keepPreset(name, preset) {
    const id = `preset/${name}`;
    if (!this.database) return preset ? this.memory.set(id, { id, name, preset }) : this.memory.delete(id);
    return this.run("readwrite", (store) => (preset ? store.put({ id, name, preset }) : store.delete(id)));
  }

  run(mode, request) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(STORE, mode);
      const asked = request(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(asked.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}
