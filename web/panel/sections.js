/**
 * The sections of the panel. Each returns the elements that show one part of what the server pushed.
 *
 * @module
 */
import { found } from "../badges.js";
import { known, t } from "../texts.js";
import { element } from "./element.js";
import { history } from "./history.js";
import { deviceTitle, doing, duration, layoutLines, median, modelLine, models, size, stepTime } from "./words.js";

/** @typedef {import("../backend.js").Shown} Shown */
/** @typedef {import("../backend.js").Rank} Rank */
/** @typedef {import("../backend.js").Status} Status */
/** @typedef {{title: string, content: Node[]}} Section */

/**
 * @param {string} text
 * @param {string} [name] a class
 */
function line(text, name = "") {
  return element("p", { class: `pdit-line ${name}` }, text);
}

/**
 * @param {string} label
 * @param {number | null} share 0 to 1
 * @param {string} text
 */
function gauge(label, share, text) {
  const words = element("span", { class: "pdit-gauge-text" }, `${label}: ${text}`);
  if (share === null) return element("div", { class: "pdit-gauge" }, words);
  const percent = Math.round(100 * Math.min(1, Math.max(0, share)));
  const bar = element("div", {
    role: "meter", class: "pdit-bar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100,
    "aria-valuenow": percent, "aria-valuetext": text,
  }, element("div", { class: "pdit-fill", style: `width: ${percent}%` }));
  return element("div", { class: "pdit-gauge" }, words, bar);
}

/** @param {Rank} rank */
function device(rank) {
  const used = t("device.of", { used: size(rank.device_used), total: size(rank.device_total) });
  const own = t("device.own", { memory: size(rank.device_memory || rank.memory) });
  const memory = rank.device_total ? `${used}, ${own}` : size(rank.device_memory || rank.memory);
  const load = rank.load === null ? t("device.unknown") : `${Math.round(100 * rank.load)} %`;
  return element("li", { class: "pdit-device" },
    element("h4", {}, deviceTitle(rank)),
    line(doing(rank), "pdit-doing"),
    gauge(t("device.memory"), rank.device_total ? rank.device_used / rank.device_total : null, memory),
    gauge(t("device.load"), rank.load, load));
}

/** @param {Status | null} status */
export function devices(status) {
  const ranks = status?.ranks ?? [];
  const cpus = ranks.length > 0 && ranks.every((rank) => rank.device === "cpu");
  const content = ranks.length ? [element("ul", { class: "pdit-devices" }, ...ranks.map(device))] : [line(t("device.none"))];
  return { title: t(cpus ? "section.processes" : "section.devices"), content };
}

/** @param {Status | null} status */
export function model(status) {
  const held = status ? models(status) : [];
  const lines = held.flatMap((each) => [line(modelLine(each)), ...(each.note ? [line(each.note, "pdit-note")] : [])]);
  return { title: t("section.model"), content: lines.length ? lines : [line(t("model.none"))] };
}

/**
 * @param {Status | null} status
 * @param {boolean | null} automatic whether the backend chose the layout; null if that is not known
 * @param {string} reason why it did; "" if no plan chose it
 */
export function layout(status, automatic, reason) {
  if (!status?.layout) return { title: t("section.layout"), content: [line(t("layout.none"))] };
  const lines = layoutLines(status.layout);
  const who = automatic === null ? [] : [line(t(automatic ? "layout.automatic" : "layout.chosen"))];
  const why = automatic && reason ? [line(reason)] : [];
  const rows = lines.flatMap(({ name, meaning }) => [element("dt", {}, name), element("dd", {}, meaning)]);
  const content = rows.length ? [element("dl", { class: "pdit-layout" }, ...rows)] : [line(t("layout.one"))];
  const kind = status.approximation;
  return { title: t("section.layout"), content: [...who, ...why, ...content, ...(kind ? [line(t("layout.approximate", { kind }), "pdit-note")] : [])] };
}

/**
 * @param {string} id as ComfyUI names nodes
 * @returns {string} what the user reads on the node
 */
function nodeName(id) {
  const title = found(id)?.title;
  return title ? `${title} (${id})` : id;
}

/** @param {Status | null} status */
export function queue(status) {
  const work = status?.work;
  const lines = [];
  if (work) {
    const kind = t(`kind.${work.kind}`);
    const what = work.origin?.node ? t("queue.node", { kind, node: nodeName(work.origin.node) }) : kind;
    lines.push(line(t("queue.running", { what, time: duration(work.seconds) })));
  }
  if (status?.queued.length) lines.push(line(t("queue.waiting", { count: status.queued.length })));
  return { title: t("section.queue"), content: lines.length ? lines : [line(t("queue.nothing"))] };
}

/** @param {Shown["steps"]} steps */
export function steps(steps) {
  const title = t("section.steps");
  if (!steps.seconds.length) return { title, content: [line(t("steps.none"))] };
  const seconds = stepTime(median(steps.seconds.slice(-5)));
  const done = t("steps.done", { done: steps.done, total: steps.total, seconds });
  const left = steps.left && steps.done < steps.total ? `, ${t("steps.left", { time: duration(steps.left) })}` : "";
  return { title, content: [line(done + left), history(steps.seconds)] };
}

/**
 * @param {Shown["trouble"]} trouble
 * @returns {Section | null}
 */
export function trouble(trouble) {
  if (!trouble) return null;
  const time = new Date(1000 * trouble.at).toLocaleTimeString();
  const node = trouble.origin?.node;
  const when = node ? t("trouble.at", { time, node: nodeName(node) }) : t("trouble.when", { time });
  const remedy = trouble.code ? known(`remedy.${trouble.code}`, "") : "";
  const content = [line(trouble.text, "pdit-trouble"), ...(remedy ? [line(remedy)] : []), line(when, "pdit-note")];
  return { title: t(trouble.code ? "section.trouble" : "section.recovery"), content };
}

/** @param {{verdict: string, check: string, text: string, advice: string}[]} findings */
export function doctor(findings) {
  const rows = findings.filter((each) => each.verdict !== "not here").flatMap((each) => [
    element("dt", { class: `pdit-verdict-${each.verdict}` }, `${t(`verdict.${each.verdict}`)}: ${each.check}`),
    element("dd", {}, each.text, ...(each.advice ? [line(`→ ${each.advice}`)] : [])),
  ]);
  return { title: t("section.doctor"), content: [element("dl", { class: "pdit-layout" }, ...rows)] };
}
