// Conversations in the browser: IndexedDB, or memory where a browser keeps nothing.

import { merged } from "./conversation.js";

const NAME = "mlx-serve";
const STORE = "conversations";
export const MAX_CONVERSATIONS = 500;

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
  }

  /** Whether conversations outlive the page. */
  get keeps() {
    return this.database !== null;
  }

  async all() {
    const found = this.database ? await this.ask("readonly", (store) => store.getAll()) : [...this.memory.values()];
    return found.sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    return (this.database ? await this.ask("readonly", (store) => store.get(id)) : this.memory.get(id)) ?? null;
  }

  /** Keeps a conversation, with what another tab has added to it meanwhile; returns both as one. */
  async put(conversation) {
    const known = await this.get(conversation.id);
    const whole = known ? merged(conversation, known) : conversation;
    if (this.database) await this.ask("readwrite", (store) => store.put(structuredClone(whole)));
    else this.memory.set(whole.id, structuredClone(whole));
    this.channel?.postMessage(whole.id);
    return whole;
  }

  async remove(id) {
    if (this.database) await this.ask("readwrite", (store) => store.delete(id));
    else this.memory.delete(id);
    this.channel?.postMessage(id);
  }

  ask(mode, request) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(STORE, mode);
      const asked = request(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(asked.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}
