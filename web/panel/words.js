/**
 * Numbers, layouts and processes in words. Nothing here touches the page.
 *
 * @module
 */
import { known, t } from "../texts.js";

/** @typedef {import("../backend.js").Rank} Rank */
/** @typedef {import("../backend.js").Model} Model */
/** @typedef {import("../backend.js").Status} Status */

const AXES = ["data", "cfg", "pipe", "ring", "ulysses", "dsp", "tensor"];
const MEMORY_FILE = /^\/proc\/\d+\/fd\/\d+$/;

/** @param {number} bytes */
export function size(bytes) {
  return bytes < 2 ** 30 ? `${Math.round(bytes / 2 ** 20)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 90) return t("time.seconds", { count: Math.round(seconds) });
  if (seconds < 5400) return t("time.minutes", { count: Math.round(seconds / 60) });
  return t("time.hours", { count: (seconds / 3600).toFixed(1) });
}

/** @param {number} seconds */
export function stepTime(seconds) {
  return seconds < 0.1 ? seconds.toFixed(3) : seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1);
}

/** @param {number[]} numbers */
export function median(numbers) {
  const sorted = [...numbers].sort((one, other) => one - other);
  return sorted[Math.floor(sorted.length / 2)] ?? 0;
}

/** @param {Rank} rank */
export function deviceTitle(rank) {
  const [kind, number] = rank.device.split(":");
  const title = kind === "cpu" ? t("device.cpu", { number: rank.rank }) : t("device.gpu", { number: number ?? 0 });
  const name = rank.device_name && kind !== "cpu" ? ` · ${rank.device_name}` : "";
  return title + name + (rank.host ? ` ${t("device.host", { host: rank.host })}` : "");
}

/** @param {Rank} rank */
export function doing(rank) {
  const { phase, step, steps, waiting } = rank.progress;
  if (!phase) return t("doing.idle");
  const name = known(`phase.${phase}`, phase);
  const text = steps ? t("doing.step", { phase: name, step: Math.min(step + 1, steps), steps }) : name;
  return waiting ? `${text}, ${t("doing.waiting")}` : text;
}

/** @param {Model} model */
export function modelLine(model) {
  const name = MEMORY_FILE.test(model.path) ? t("model.copied") : model.path.split("/").filter(Boolean).pop();
  return t("model.line", { name, dtype: model.dtype, parts: model.parts.join(", ") });
}

/**
 * @param {Status} status
 * @returns {Model[]} the models of all ranks, each once
 */
export function models(status) {
  const all = status.ranks.flatMap((rank) => rank.models);
  return [...new Map(all.map((model) => [`${model.path} ${model.dtype}`, model])).values()];
}

/**
 * @param {NonNullable<Status["layout"]>} layout
 * @returns {{name: string, meaning: string}[]} a line for each degree above 1
 */
export function layoutLines(layout) {
  const degrees = AXES.filter((axis) => Number(layout[axis] ?? 1) > 1);
  const lines = degrees.map((axis) => ({ name: `${axis}=${layout[axis]}`, meaning: t(`axis.${axis}`) }));
  return layout.shard_weights ? [...lines, { name: "shard_weights", meaning: t("axis.shard_weights") }] : lines;
}
