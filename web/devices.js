/**
 * The `devices` of a node as a choice of what there is. It stays a text: saved workflows and the API may hold any list.
 *
 * @module
 */
import { ask } from "./backend.js";
import { app } from "./comfy.js";
import { t } from "./texts.js";

/** @typedef {{value: string, count: number}} Choice `count` is 0 if it is not known */

const NODES = ["ParallelLoader", "ParallelModel", "ParallelVAE"];
const INPUT = "devices";
/** Opens a dialog. It is never the value for longer than that takes. */
const OTHER = "…";

/** What the server found. @type {{gpus: string[], choices: Choice[]}} */
let found = { gpus: [], choices: [{ value: "all", count: 0 }] };

/** Milliseconds that the page waits for the answer before it goes on. */
const PATIENCE = 2000;

/** Asks the server what there is, now. Another machine's backend may take its time to answer. */
export async function findDevices() {
  const answer = ask("devices").then((each) => (found = each), () => {}).then(() => app.canvas?.setDirty(true, true));
  await Promise.race([answer, new Promise((resolve) => setTimeout(resolve, PATIENCE))]);
}

/**
 * Makes the text of a new node a choice.
 *
 * @param {any} node
 */
export function offerDevices(node) {
  const place = NODES.includes(node.comfyClass) ? node.widgets?.findIndex((/** @type {any} */ each) => each.name === INPUT) : -1;
  if (!(place >= 0)) return;
  const [text] = node.widgets.splice(place, 1);
  const choice = node.addWidget("combo", INPUT, text.value, (/** @type {string} */ value) => chosen(value), {
    ...text.options, getOptionLabel: label, values: [],
  });
  Object.assign(choice, { label: text.label, tooltip: text.tooltip });
  node.widgets.splice(node.widgets.indexOf(choice), 1);
  node.widgets.splice(place, 0, choice);
  let held = choice.value;
  const configured = node.onConfigure;
  node.onConfigure = function (/** @type {any[]} */ ...given) {
    configured?.apply(this, given);
    held = choice.value;
  };
  Object.defineProperty(choice.options, "values", {
    configurable: true, enumerable: true, set: () => {}, get: () => {
      if (choice.value !== OTHER) held = choice.value;
      return values(held);
    },
  });

  /** @param {string} value */
  function chosen(value) {
    if (value === OTHER) setTimeout(write); // after the page is done with this value
    else held = value;
  }

  async function write() {
    choice.value = held;
    const answer = await app.extensionManager.dialog.prompt({
      title: t("devices.title"), message: t("devices.ask"), defaultValue: held,
    });
    held = answer?.trim() || held;
    choice.value = held;
    node.setDirtyCanvas?.(true, true);
  }
}

/**
 * @param {string} held
 * @returns {string[]} what is offered, and what the node has
 */
function values(held) {
  const offered = found.choices.map((each) => each.value);
  return [...(offered.includes(held) ? [] : [held]), ...offered, OTHER];
}

/** @param {string | null} value */
function label(value) {
  if (value === OTHER) return t("devices.other");
  const choice = found.choices.find((each) => each.value === value);
  if (!choice?.count) return value ?? "";
  const { count } = choice;
  if (!found.gpus.length) return count === 1 ? t("devices.process", { value }) : t("devices.processes", { value, count });
  if (count > 1) return t("devices.gpus", { value, count });
  return t("devices.gpu", { value, name: found.gpus[Number(value) || 0] });
}
