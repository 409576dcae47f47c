/**
 * Toasts of ComfyUI's own.
 *
 * @module
 */
import { app } from "../comfy.js";

/** Milliseconds that a toast stays. One about a failure stays until it is closed. */
const LIFE = 12_000;

/**
 * @param {"success" | "info" | "warn" | "error"} severity
 * @param {string} summary
 * @param {string} detail
 */
export function tell(severity, summary, detail) {
  const life = severity === "error" ? undefined : LIFE;
  app.extensionManager.toast.add({ severity, summary, detail, life });
}
