// Owns what outlives a reload: how values get into the browser's storage and back. Knows what a
// message looks like, nothing of how it is made. Invariant: whatever is stored, by whomever, and
// whether there is a storage or none, a value of the form that the page works with comes back.

import { STATUSES, isOpen, newAnswer } from "./answer.js";

const MAX_CHARS = 1_000_000; // of a conversation; browsers allow millions

/** What "sessionStorage" or "localStorage" has by that name, if it is of the fallback's type. */
export function recall(storage, name, fallback) {
  try {
    const value = JSON.parse(globalThis[storage].getItem(`streamkv.${name}`));
    return value !== null && typeof value === typeof fallback ? value : fallback;
  } catch {
    return fallback; // not of our making, or the browser forbids storing
  }
}

export function keep(storage, name, value) {
  try {
    globalThis[storage].setItem(`streamkv.${name}`, JSON.stringify(value));
  } catch (error) {
    console.warn(`streamkv: ${name} won't outlive this page:`, error.message);
  }
}

export function recallMessages() {
  const stored = recall("sessionStorage", "messages", []);
  const messages = Array.isArray(stored) ? stored.map(readMessage).filter(Boolean) : [];
  return [...new Map(messages.map((message) => [message.id, message])).values()];
}

export const keepMessages = (messages) => keep("sessionStorage", "messages", newest(messages));

/** The newest turns of a conversation that fit, from a user's message on. */
export function newest(messages, maxChars = MAX_CHARS) {
  let start = messages.length;
  let numChars = 0;
  for (let index = messages.length - 1; index >= 0; index -= 1) {
    numChars += JSON.stringify(messages[index]).length + 1;
    if (numChars > maxChars) break;
    if (messages[index].role === "user") start = index;
  }
  return messages.slice(start);
}

/** A message of what was stored; null if it is none. */
export function readMessage(stored) {
  const { id, role, text } = stored ?? {};
  if (typeof id !== "string" || typeof text !== "string") return null;
  if (role === "user") return { id, role, text };
  if (role !== "assistant") return null;
  const answer = alike(newAnswer(id, 0), stored);
  // Text without the number of its last event can't be gone on with.
  const isLost = isOpen(answer) && answer.text && answer.number < 0;
  return isLost || !STATUSES.includes(answer.status) ? { ...answer, status: "dropped" } : answer;
}

/** The model's fields with the values of `stored`, where those are of the same type. */
function alike(model, stored) {
  const fits = (name) => typeof stored[name] === typeof model[name];
  const names = Object.keys(model).filter(fits);
  return { ...model, ...Object.fromEntries(names.map((name) => [name, stored[name]])) };
}
