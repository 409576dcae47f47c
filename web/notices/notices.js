/**
 * Toasts about the running prompt: what failed, what was done about it, and that a result is approximate.
 *
 * @module
 */
import { api } from "../comfy.js";
import { known, t } from "../texts.js";
import { tell } from "./toast.js";

/** @typedef {{kind: "failed" | "recovered" | "approximate", text: string, code: string, node: string}} Notice */

const EVENT = "parallel_dit.notice";

/** Shows toasts from now on. */
export function showNotices() {
  api.addEventListener(EVENT, (/** @type {{detail: Notice}} */ { detail }) => {
    const { kind, text, code } = detail;
    if (kind === "approximate") tell("info", t("notice.approximate"), t("notice.approximate.how", { kind: text }));
    else if (kind === "recovered") tell("warn", t("notice.recovered"), text);
    else tell("error", t("notice.failed"), [text, known(`remedy.${code}`, "")].filter(Boolean).join("\n"));
  });
}
