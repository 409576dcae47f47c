/**
 * Parallel Layout shows its mode first. Its numbers count in the mode `degrees` alone, and choose it when they change.
 *
 * @module
 */

const NODE = "ParallelLayout";
const MODE = "mode";
const DEGREES = "degrees";

/**
 * Ties the mode and the numbers of a new node together.
 *
 * @param {any} node
 */
export function tieMode(node) {
  if (node.comfyClass !== NODE) return;
  const mode = modeOf(node);
  for (const widget of node.widgets) {
    const before = widget.callback;
    widget.callback = (/** @type {any[]} */ ...given) => {
      const result = before?.apply(widget, given);
      if (widget !== mode) mode.value = DEGREES;
      showNumbers(node);
      return result;
    };
  }
}

/**
 * Shows the numbers of a loaded node if they count. A workflow that was saved before there were modes begins with a
 * number.
 *
 * @param {any} node
 */
export function showLoaded(node) {
  if (node.comfyClass !== NODE) return;
  const saved = node.widgets_values;
  if (typeof saved?.[0] === "number") readWithoutMode(node, saved);
  showNumbers(node);
}

/** The inputs of workflows without a mode, in the order of their values. */
const BEFORE = [
  "data", "cfg", "pipe", "ring", "ulysses", "tensor", "shard_weights", "stale", "patches", "warmup", "balance", "dsp",
];

/**
 * @param {any} node
 * @param {any[]} saved
 */
function readWithoutMode(node, saved) {
  const values = Object.fromEntries(saved.map((value, place) => [BEFORE[place], value]));
  const { optional = {} } = node.constructor.nodeData?.input ?? {};
  for (const widget of node.widgets) widget.value = values[widget.name] ?? optional[widget.name]?.[1]?.default;
  modeOf(node).value = DEGREES;
}

/** @param {any} node */
function showNumbers(node) {
  if (modeOf(node).value === DEGREES) node.showAdvanced = true;
}

/** @param {any} node */
function modeOf(node) {
  return node.widgets.find((/** @type {any} */ each) => each.name === MODE);
}
