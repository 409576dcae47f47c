/**
 * The settings page. What is chosen there reaches the backend through a file that the environment goes before.
 *
 * @module
 */
import { Refused, ask } from "./backend.js";
import { app } from "./comfy.js";
import { tell } from "./notices/toast.js";
import { t } from "./texts.js";

/**
 * @typedef {object} Choice
 * @property {string} id in ComfyUI
 * @property {string} variable of the backend
 * @property {string} name
 * @property {string} type
 * @property {unknown} standard
 * @property {string} tooltip
 * @property {string[]} [options]
 * @property {Record<string, number>} [attrs]
 */

/** @type {Choice[]} */
const CHOICES = [
  {
    id: "ParallelDiT.Backend.IdleTimeout", variable: "PARALLEL_DIT_IDLE_TIMEOUT", name: "Idle time (seconds)",
    type: "number", standard: 600, attrs: { min: 0, max: 604800, step: 60 },
    tooltip: "After this time without work the backend ends, and gives its memory back. 0: it runs until it is stopped.",
  },
  {
    id: "ParallelDiT.Backend.Devices", variable: "PARALLEL_DIT_DEVICES", name: "Default devices", type: "text",
    standard: "all", tooltip: "The GPUs that \"all\" in a node means, such as 0,1.",
  },
  {
    id: "ParallelDiT.Backend.Mode", variable: "PARALLEL_DIT_MODE", name: "Mode", type: "combo", standard: "auto",
    options: ["auto", "memory"],
    tooltip: "auto: the whole weights on each GPU if they fit. memory: always one copy of the weights, shared by all GPUs. A Parallel Layout overrides this, unless its mode is auto.",
  },
  {
    id: "ParallelDiT.Backend.Previews", variable: "PARALLEL_DIT_PREVIEWS", name: "Previews of Parallel Sampler",
    type: "combo", standard: "on", options: ["on", "off"],
    tooltip: "The kind of preview is that of ComfyUI.",
  },
  {
    id: "ParallelDiT.Backend.LogLevel", variable: "PARALLEL_DIT_LOG_LEVEL", name: "Log level", type: "combo",
    standard: "INFO", options: ["DEBUG", "INFO", "WARNING"],
    tooltip: "What a backend that starts next writes into its logs.",
  },
];

/** What the server has, by variable; empty before it was asked. @type {Map<string, string>} */
const held = new Map();

/** @returns {object[]} the settings as ComfyUI's page takes them */
export function settings() {
  return CHOICES.map((choice) => ({
    id: choice.id,
    category: ["Parallel DiT", "Backend", choice.id.split(".").pop()],
    name: choice.name,
    type: choice.type,
    defaultValue: choice.standard,
    tooltip: choice.tooltip,
    ...(choice.options && { options: choice.options }),
    ...(choice.attrs && { attrs: choice.attrs }),
    onChange: (/** @type {unknown} */ value) => void changed(choice, String(value ?? "")),
  }));
}

/** Shows in the page what the server has: another page, or a person in the file, may have changed it. */
export async function readSettings() {
  const answer = await ask("settings").catch(() => null);
  if (!answer) return;
  for (const choice of CHOICES) {
    const text = answer[choice.variable]?.chosen || String(choice.standard);
    held.set(choice.variable, text);
    const value = choice.type === "number" ? Number(text) : text;
    if (String(app.extensionManager.setting.get(choice.id)) !== text) await app.extensionManager.setting.set(choice.id, value);
  }
}

/**
 * @param {Choice} choice
 * @param {string} text
 */
async function changed(choice, text) {
  const before = held.get(choice.variable);
  if (before === undefined || before === text) return; // the page only says what it has
  held.set(choice.variable, text);
  try {
    const answer = await ask("settings", { [choice.variable]: text === String(choice.standard) ? "" : text });
    if (answer[choice.variable].fixed) tell("warn", choice.name, t("settings.fixed", { variable: choice.variable }));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    held.set(choice.variable, before);
    tell("error", t("settings.refused", { name: choice.name }), error.message);
    await app.extensionManager.setting.set(choice.id, choice.type === "number" ? Number(before) : before);
  }
}
