/**
 * The words of the page's language, or English ones.
 *
 * @module
 */
import { app } from "./comfy.js";
import en from "./texts/en.js";
import zh from "./texts/zh.js";

/** @type {Record<string, Record<string, string>>} */
const LANGUAGES = { en, zh, "zh-TW": zh };

/** @returns {string} the language that the user has chosen in ComfyUI */
function language() {
  const chosen = app.extensionManager?.setting?.get("Comfy.Locale");
  return typeof chosen === "string" && chosen in LANGUAGES ? chosen : "en";
}

/**
 * Returns a text. `{name}` in it becomes a value.
 *
 * @param {string} key
 * @param {Record<string, unknown>} [values]
 * @returns {string}
 */
export function t(key, values = {}) {
  const text = LANGUAGES[language()][key] ?? en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/**
 * Returns a text, or `otherwise` if there is none.
 *
 * @param {string} key
 * @param {string} otherwise
 * @returns {string}
 */
export function known(key, otherwise) {
  return key in en ? t(key) : otherwise;
}
