// The keys of the page.

import { el } from "/js/dom.js";

const keys = [
  ["1 to 6", "go to a view"], ["/", "go to the filter"], ["↑ ↓ ← →", "move over the map, or over rows"], ["Enter", "select, or open"],
  ["Esc", "close the selection"], ["p", "pause, or go on"], ["?", "this list"],
];

export function help() {
  const dialog = el("dialog", { class: "keys", "aria-label": "Keys" }, el("h2", {}, "Keys"),
    el("dl", { class: "facts" }, keys.flatMap(([k, v]) => [el("dt", {}, el("kbd", {}, k)), el("dd", {}, v)])),
    el("form", { method: "dialog" }, el("button", { type: "submit", class: "primary" }, "Close")));
  document.body.append(dialog);
  return { open: () => dialog.showModal() };
}
