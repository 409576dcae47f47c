/**
 * The one notice that comes by itself: what was found here, the first time that the page opens with the extension.
 *
 * @module
 */
import { ask } from "../backend.js";
import { app } from "../comfy.js";
import { element } from "../panel/element.js";
import { t } from "../texts.js";

/** Remembers that it was shown. */
export const MET = { id: "ParallelDiT.Met", name: "Parallel DiT was met", type: "hidden", defaultValue: false };

/**
 * Shows the notice, unless it was closed before.
 *
 * @param {() => void} makeParallel
 */
export async function meet(makeParallel) {
  if (app.extensionManager.setting.get(MET.id)) return;
  const found = await ask("devices").catch(() => null);
  if (!found) return;
  const several = found.gpus.length > 1 || found.processes > 1;
  const close = () => {
    notice.remove();
    void app.extensionManager.setting.set(MET.id, true);
  };
  const doing = (/** @type {string} */ text, /** @type {() => void} */ act) =>
    element("button", { type: "button", class: "pdit-button", click: act }, t(text));
  const parallel = doing("button.parallel", () => (close(), makeParallel()));
  // Stays open: Make parallel is for the workflow that comes of it.
  const templates = doing("contact.templates", browseTemplates);
  const notice = element("section", { class: "pdit-contact", role: "status", "aria-label": t("title") },
    element("strong", {}, t("title")),
    element("p", {}, sentence(found)),
    element("div", { class: "pdit-buttons" }, ...(several ? [parallel, templates] : [templates]), doing("contact.close", close)));
  document.body.append(notice);
}

/** @param {{gpus: string[], processes: number, problem: string}} found */
function sentence({ gpus, processes, problem }) {
  if (problem) return problem;
  if (gpus.length > 1) return t("contact.several", { count: gpus.length, names: [...new Set(gpus)].join(", ") });
  return gpus.length ? t("contact.one", { name: gpus[0] }) : t("contact.none", { count: processes });
}

function browseTemplates() {
  void app.extensionManager.command.execute("Comfy.BrowseTemplates");
}
