/**
 * The panel in ComfyUI's sidebar: what the backend does, and buttons.
 *
 * @module
 */
import { watch } from "../backend.js";
import { t } from "../texts.js";
import { buttons } from "./buttons.js";
import { element } from "./element.js";
import * as sections from "./sections.js";
import { duration } from "./words.js";

/** @typedef {import("../backend.js").Shown} Shown */
/** @typedef {import("./sections.js").Section} Section */

/** Whether the backend chose the layout that it has, as long as the page lives. @type {boolean | null} */
let automatic = null;

/**
 * Shows the panel in an element, until the returned function is called.
 *
 * @param {HTMLElement} place
 * @param {HTMLElement[]} more further buttons
 * @returns {() => void}
 */
export function show(place, more) {
  const state = element("p", { class: "pdit-state", role: "status" }, t("state.unknown"));
  const [idle, refusal] = [element("p", { class: "pdit-line pdit-note" }), element("p", { class: "pdit-line pdit-note" })];
  const [parts, extras] = [element("div", {}), element("div", {})];
  const extra = (/** @type {Section} */ section) => extras.replaceChildren(...[section].map(drawn));
  const actions = buttons({
    onDoctor: (findings) => extra(sections.doctor(findings)),
    onReport: (text) => extra(report(text)),
    more,
  });
  const panel = element("section", { class: "pdit-panel", "aria-label": t("title") },
    element("h2", {}, t("title")), state, idle, refusal, actions.bar, actions.said, parts, extras);
  place.replaceChildren(panel);
  let [now, why] = ["unknown", ""];

  /** @param {string} text */
  function say(text) {
    if (state.textContent !== text) state.textContent = text; // a screen reader reads it again otherwise
  }

  return watch(
    (/** @type {Shown} */ shown) => {
      now = shown.state;
      if (shown.status?.work) automatic = shown.status.work.automatic;
      const elsewhere = shown.endpoint ? ` ${t("state.elsewhere", { place: shown.endpoint })}` : "";
      say(t(`state.${shown.state}`) + elsewhere + (shown.problem ? ` ${shown.problem}` : ""));
      panel.dataset.state = shown.state;
      const seconds = shown.status?.idle_timeout;
      idle.textContent = !shown.status ? "" : seconds ? t("idle.after", { time: duration(seconds) }) : t("idle.never");
      parts.replaceChildren(...drawnAll(shown));
      actions.allow(now, why);
    },
    (refused) => {
      why = refusal.textContent = refused;
      actions.allow(now, why);
    },
    () => say(t("state.lost")),
  );
}

/** @param {Shown} shown */
function drawnAll(shown) {
  const found = [
    sections.trouble(shown.trouble),
    sections.devices(shown.status),
    sections.steps(shown.steps),
    sections.queue(shown.status),
    sections.model(shown.status),
    sections.layout(shown.status, automatic, shown.reason),
  ];
  return found.filter((section) => section !== null).map(drawn);
}

/** @param {Section} section */
function drawn({ title, content }) {
  return element("div", { class: "pdit-section" }, element("h3", {}, title), ...content);
}

/**
 * @param {string} text
 * @returns {Section}
 */
function report(text) {
  const area = element("textarea", { class: "pdit-report", readonly: "", rows: 12, "aria-label": t("section.report") });
  area.textContent = text;
  return { title: t("section.report"), content: [area] };
}
