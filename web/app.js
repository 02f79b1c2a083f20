// Owns the page's one state object, and what buttons, keys and the server do to it. Knows the
// protocol only as transport.js, the looks only as render(state). Invariants: the state is the only
// truth; the document is never read back, except for what is being typed, which goes into the
// state at once. An open answer is gone on with whenever there is a connection again, after a
// reload of the page, too.

import { errorText, isOpen, newAnswer, nextAnswer } from "./answer.js";
import { copyText } from "./dom.js";
import { keep, keepMessages, recall, recallMessages } from "./memory.js";
import * as transport from "./transport.js";
import { render } from "./view.js";

// A small model rambles at temperature 1 and repeats itself far below; "" is the server's choice.
const DEFAULT_SETTINGS = {
  instructions: "",
  temperature: 0.7,
  top_p: 0.95,
  top_k: "",
  max_output_tokens: 1024,
  seed: "",
};
const SENDABLE_KEY = /^[\w!#$%&'*+.^`|~-]+$/; // what a WebSocket subprotocol may be made of

const $ = (id) => document.getElementById(id);
const settingsForm = $("settings").querySelector("form");
const keyForm = $("key").querySelector("form");

const state = {
  link: transport.FIRST_LINK,
  messages: recallMessages(),
  draft: recall("sessionStorage", "draft", ""),
  editing: "", // id of the user's message that the draft will replace
  settings: recallSettings(),
  theme: recall("localStorage", "theme", ""), // "": as the system has it
  notice: "", // an error that belongs to no answer
  isFollowing: true, // the view stays at the newest line
};

const link = new transport.Link({
  origin: location.origin,
  key: recall("sessionStorage", "key", ""),
  onEvent: receive,
  onLink(now) {
    update({ link: now });
    if (now.phase === "ready") goOn();
    else cutOff();
    if (now.phase === "locked") askForKey();
  },
});

// --- state ---------------------------------------------------------------------------------------

let frame = 0;

/** Changes the state; however many changes come before the next frame, that draws them all. */
function update(changes) {
  Object.assign(state, changes);
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    render(state);
  });
}

// Who edits a setting in the storage by hand is told by the server what is wrong with it.
function recallSettings() {
  const stored = recall("localStorage", "settings", {});
  const isPlain = (name) => ["number", "string"].includes(typeof stored[name]);
  const names = Object.keys(DEFAULT_SETTINGS).filter(isPlain);
  return { ...DEFAULT_SETTINGS, ...Object.fromEntries(names.map((name) => [name, stored[name]])) };
}

const openAnswers = () => state.messages.filter(isOpen);
const isBusy = () => openAnswers().length > 0;

/** Replaces an answer by what an event makes of it. */
function change(answer, event) {
  const next = nextAnswer(answer, event, nowMs());
  if (next === answer) return next;
  update({ messages: state.messages.with(state.messages.indexOf(answer), next) });
  if (!isOpen(next)) keepMessages(state.messages);
  return next;
}

const nowMs = () => performance.timeOrigin + performance.now(); // the next page's clock, too

/** Nobody can guess it: who knows the id of an answer may read it, where a server has no keys. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// --- conversation --------------------------------------------------------------------------------

function send(text) {
  if (!text.trim() || state.link.phase !== "ready" || isBusy()) return;
  const end = state.messages.findIndex((message) => message.id === state.editing);
  const before = end < 0 ? state.messages : state.messages.slice(0, end);
  if (text === state.draft) setDraft("");
  update({ editing: "" });
  ask([...before, { id: newId(), role: "user", text: text.trim() }]);
}

/** Asks for the answer to a conversation, in a lane of its own. */
function ask(messages, { sentMs = nowMs(), isRepeat = false } = {}) {
  const answer = { ...newAnswer(newId(), sentMs), isRepeat };
  const { settings, link: { model } } = state;
  link.send(transport.createEvent({ model, messages, settings, id: answer.id }));
  update({ messages: [...messages, answer], isFollowing: true, notice: "" });
  keepMessages(state.messages);
}

function receive(event) {
  if (event.type === "error" && !event.stream_id) update({ notice: errorText(event) });
  const answer = state.messages.find((message) => message.id === event.stream_id);
  if (!answer) return; // of a chat that was left meanwhile
  const next = change(answer, event);
  if (next.status !== "unsent") return;
  const before = state.messages.slice(0, state.messages.indexOf(next));
  ask(before, { sentMs: next.sentMs, isRepeat: true });
}

/** Cancels by lane: that works before the response has an id, too. Its last event then comes. */
function stop() {
  for (const answer of openAnswers()) {
    if (isOpen(change(answer, { type: "stop" }))) {
      link.send({ type: "response.cancel", stream_id: answer.id });
    } else {
      link.abandon(answer.id);
    }
  }
}

/** The connection is lost, or the page new. */
function cutOff() {
  for (const answer of openAnswers()) {
    if (!isOpen(change(answer, { type: "cut" }))) link.abandon(answer.id);
  }
}

/** There is a connection again. */
function goOn() {
  update({ notice: "" });
  for (const answer of openAnswers()) link.send(transport.resumeEvent(answer));
}

function setDraft(draft) {
  update({ draft });
  keep("sessionStorage", "draft", draft);
}

const actions = {
  stop,
  jump: () => update({ isFollowing: true }),
  retry: () => link.connect(),
  "enter-key": askForKey,
  "close-key": () => $("key").close(),
  "cancel-edit"() {
    update({ editing: "" });
    setDraft("");
  },
  "new-chat"() {
    stop();
    update({ messages: [], editing: "", notice: "", isFollowing: true });
    keepMessages([]);
    $("draft").focus();
  },
  regenerate() {
    if (state.link.phase === "ready" && !isBusy()) ask(state.messages.slice(0, -1));
  },
  continue: () => send("Continue."),
  edit(button) {
    const message = messageOf(button);
    update({ editing: message.id });
    setDraft(message.text);
    $("draft").focus();
  },
  suggest(button) {
    setDraft(button.textContent);
    $("draft").focus();
  },
  copy: (button) => copyFrom(button, messageOf(button).text),
  "copy-code"(button) {
    copyFrom(button, button.closest("figure").querySelector("code").textContent);
  },
  theme() {
    const isSystemDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const isDark = state.theme ? state.theme === "dark" : isSystemDark;
    update({ theme: isDark ? "light" : "dark" });
    keep("localStorage", "theme", state.theme);
  },
  settings() {
    for (const name in DEFAULT_SETTINGS) settingsForm.elements[name].value = state.settings[name];
    $("settings").showModal();
  },
  "reset-settings"() {
    settingsForm.reset();
    setSettings(DEFAULT_SETTINGS);
  },
};

function messageOf(element) {
  const { id } = element.closest("article").dataset;
  return state.messages.find((message) => message.id === id);
}

async function copyFrom(button, text) {
  await copyText(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// --- dialogs -------------------------------------------------------------------------------------

function setSettings(settings) {
  update({ settings });
  keep("localStorage", "settings", settings);
}

settingsForm.addEventListener("change", ({ target }) => {
  if (!target.reportValidity()) return;
  const isNumber = target.type === "number" && target.value !== "";
  const value = isNumber ? target.valueAsNumber : target.value;
  setSettings({ ...state.settings, [target.name]: value });
});

function askForKey() {
  $("key-error").textContent = link.key && state.link.detail;
  if (!$("key").open) $("key").showModal();
}

keyForm.addEventListener("submit", (event) => {
  const key = keyForm.elements.key.value.trim();
  if (SENDABLE_KEY.test(key)) {
    link.key = key;
    keep("sessionStorage", "key", key);
    link.connect();
  } else {
    event.preventDefault();
    $("key-error").textContent = "A browser can't send this key: use letters, digits and -_.~";
  }
});

// --- input ---------------------------------------------------------------------------------------

document.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-action]");
  if (button) actions[button.dataset.action](button);
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(state.draft);
});

$("draft").addEventListener("input", ({ target }) => setDraft(target.value));

$("draft").addEventListener("keydown", (event) => {
  // 229: an input method takes this key (Safari says so after isComposing has ended).
  const isComposing = event.isComposing || event.keyCode === 229;
  if (event.key !== "Enter" || event.shiftKey || isComposing) return;
  event.preventDefault();
  send(state.draft);
});

document.addEventListener("keydown", (event) => {
  const isDialogs = document.querySelector("dialog[open]");
  if (event.key !== "Escape" || event.isComposing || isDialogs) return;
  if (isBusy()) stop();
  else if (state.editing) actions["cancel-edit"]();
});

$("scroller").addEventListener("scroll", ({ currentTarget: box }) => {
  const isFollowing = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
  if (isFollowing !== state.isFollowing) update({ isFollowing });
});

addEventListener("resize", () => update({}));
addEventListener("online", () => state.link.phase === "waiting" && link.connect());
addEventListener("pagehide", () => keepMessages(state.messages));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) keepMessages(state.messages); // a phone may end it without a pagehide
});

link.connect();
render(state);
