/**
 * The buttons of the panel, and the line that says what became of the last one.
 *
 * @module
 */
import { Refused, ask } from "../backend.js";
import { t } from "../texts.js";
import { element } from "./element.js";
import { copy } from "./copying.js";

/** @typedef {"start" | "stop" | "unload" | "cancel" | "doctor" | "report"} Name */

/** @type {Name[]} */
const NAMES = ["start", "stop", "unload", "cancel", "doctor", "report"];

/**
 * @typedef {object} Buttons
 * @property {HTMLElement} bar
 * @property {HTMLElement} said
 * @property {(state: string, refused: string) => void} allow says which of them make sense now
 */

/**
 * @param {{onDoctor: (findings: any[]) => void, onReport: (text: string) => void, more: HTMLElement[]}} uses
 * @returns {Buttons}
 */
export function buttons({ onDoctor, onReport, more }) {
  const said = element("p", { class: "pdit-line pdit-said", role: "status" });
  const made = new Map(NAMES.map((name) => [name, button(name, () => press(name))]));
  /** @type {Set<Name>} */
  const running = new Set();
  let [state, refused] = ["unknown", ""];

  /** @param {Name} name */
  async function press(name) {
    running.add(name);
    update();
    said.textContent = t(`wait.${name}`);
    try {
      const answer = await ask(name, {});
      said.textContent = t(`done.${name}`);
      if (name === "doctor") onDoctor(answer.findings);
      if (name === "report") {
        onReport(answer.text);
        if (!(await copy(answer.text))) said.textContent = t("done.report.by_hand");
      }
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      said.textContent = error.message;
    } finally {
      running.delete(name);
      update();
    }
  }

  function update() {
    const on = !["off", "unknown", "unreachable"].includes(state);
    const sensible = { start: state === "off", stop: on || state === "unreachable", unload: state === "idle", cancel: on };
    for (const [name, each] of made) {
      // Stays in the order of tabs, so that a screen reader finds it and its reason.
      const off = Boolean(refused) || running.has(name) || sensible[name] === false;
      each.setAttribute("aria-disabled", String(off));
      each.title = refused || t(`button.hint.${name}`);
    }
  }

  update();
  const bar = element("div", { class: "pdit-buttons", role: "group", "aria-label": t("actions") }, ...made.values(), ...more);
  return {
    bar,
    said,
    allow(now, why) {
      [state, refused] = [now, why];
      update();
    },
  };
}

/**
 * @param {string} name
 * @param {() => void} press
 * @returns {HTMLElement}
 */
export function button(name, press) {
  const hint = t(`button.hint.${name}`);
  const made = element("button", { type: "button", class: "pdit-button", title: hint, "data-action": name }, t(`button.${name}`));
  made.addEventListener("click", () => made.getAttribute("aria-disabled") !== "true" && press());
  return made;
}
