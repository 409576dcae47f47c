/**
 * Asks the extension's routes on ComfyUI's own server.
 *
 * @module
 */
import { api } from "./comfy.js";
import { t } from "./texts.js";

/** @typedef {{phase: string, step: number, steps: number, waiting: boolean}} Progress */
/** @typedef {{path: string, dtype: string, parts: string[], loads: number, note: string}} Model */
/**
 * @typedef {object} Rank
 * @property {number} rank
 * @property {string} device such as `cuda:0`
 * @property {string} device_name
 * @property {number} memory bytes of the process
 * @property {number} device_memory bytes of the process on its device
 * @property {number} device_used bytes of all processes on it
 * @property {number} device_total
 * @property {number | null} load 0 to 1
 * @property {string} host "" for the first one
 * @property {Progress} progress
 * @property {Model[]} models
 */
/** @typedef {{prompt: string, node: string}} Origin */
/** @typedef {{kind: string, origin: Origin | null, automatic: boolean, seconds: number}} Work */
/**
 * @typedef {object} Status what `python -m parallel_backend status --json` prints
 * @property {Rank[]} ranks
 * @property {string[]} queued
 * @property {Record<string, number | boolean | string> | null} layout
 * @property {string} approximation
 * @property {number} idle_timeout
 * @property {Work | null} work
 */
/** @typedef {{done: number, total: number, seconds: number[], left: number | null, origin: Origin | null}} Steps */
/** @typedef {{text: string, code: string, origin: Origin | null, at: number}} Trouble */
/**
 * @typedef {object} Shown what the server pushes
 * @property {string} state
 * @property {Status | null} status
 * @property {string} problem
 * @property {string} [endpoint]
 * @property {Steps} steps
 * @property {Trouble | null} trouble
 * @property {string} reason why the last sampling has its layout; "" if no plan chose it
 */

const PREFIX = "/parallel_dit";
const EVENT = "parallel_dit.status";
/** Milliseconds between two renewals of a watch; the server forgets a page after three times that. */
const RENEWAL = 10_000;

/** A sentence for the user. */
export class Refused extends Error {}

/**
 * Sends a request to a route.
 *
 * @param {string} name
 * @param {object} [body] makes it a POST
 * @returns {Promise<any>} the answer
 * @throws {Refused} it is refused, or nothing answers
 */
export async function ask(name, body) {
  const options = body && { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  let response;
  try {
    response = await api.fetchApi(`${PREFIX}/${name}`, options);
  } catch {
    throw new Refused(t("failed.no_answer"));
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(answer.error ?? `${response.status} ${response.statusText}`);
  return answer;
}

/**
 * Calls back whenever what the backend does changes, until the returned function is called. A hidden page is silent.
 *
 * @param {(shown: Shown) => void} onShown
 * @param {(refused: string) => void} onRefused gets why this page may change nothing; "" if it may
 * @param {() => void} onLost called while ComfyUI does not answer
 * @returns {() => void} ends it
 */
export function watch(onShown, onRefused, onLost) {
  const pushed = (event) => onShown(event.detail);
  const renew = async () => {
    if (document.hidden) return;
    try {
      onRefused((await ask("watch", { client_id: api.clientId })).refused);
    } catch {
      onLost();
    }
  };
  const leave = () => void ask("leave", { client_id: api.clientId }).catch(() => {});
  const turned = () => (document.hidden ? leave() : renew());
  api.addEventListener(EVENT, pushed);
  api.addEventListener("reconnected", renew);
  document.addEventListener("visibilitychange", turned);
  const timer = setInterval(renew, RENEWAL);
  renew();
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", turned);
    api.removeEventListener("reconnected", renew);
    api.removeEventListener(EVENT, pushed);
    leave();
  };
}
