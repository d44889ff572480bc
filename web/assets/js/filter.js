// The filter box: what it selects is what all views show. An error is marked where it is.

import { el, text, attribute } from "/js/dom.js";
import { get, Refused } from "/js/api.js";
import { emit, on, setFilter, store } from "/js/store.js";

/** Offers a filter as if it were typed, and goes to a view. */
export function propose(filter, view) {
  emit("propose", filter);
  if (view) emit("go", view);
}

const bytesTo = (s, at) => new TextDecoder().decode(new TextEncoder().encode(s).slice(0, at)).length;
const bytesOf = (s) => new TextEncoder().encode(s).length;

export function filterBox(root) {
  const input = el("input", { type: "text", id: "filter-input", spellcheck: "false", autocomplete: "off", autocapitalize: "off", role: "combobox",
    "aria-expanded": "false", "aria-controls": "filter-list", "aria-autocomplete": "list", "aria-label": "Filter", "aria-describedby": "filter-error",
    placeholder: "Filter: service=shop/cart  attempts>1  bytes>1MB, or a word", maxlength: 2000 });
  const marks = el("div", { class: "marks", "aria-hidden": "true" });
  const clear = el("button", { type: "button", class: "quiet clear", "aria-label": "Clear the filter", hidden: true }, "✕");
  const list = el("ul", { class: "suggestions", id: "filter-list", role: "listbox", hidden: true });
  const error = el("p", { class: "wrong", id: "filter-error", role: "alert", hidden: true });
  root.append(el("div", { class: "box" }, marks, input, el("kbd", { "aria-hidden": "true" }, "/"), clear), list, error);

  let control = null;
  let timer = 0;
  let suggestions = [];
  let start = 0;
  let chosen = -1;

  function wrong(e) {
    const value = input.value;
    if (!e) {
      error.hidden = true;
      marks.replaceChildren();
      attribute(input, "aria-invalid", null);
      return;
    }
    attribute(input, "aria-invalid", "true");
    text(error, e.message.replace(/^filter, column \d+: /, ""));
    error.hidden = false;
    if (e instanceof Refused && e.filter !== undefined) {
      const a = bytesTo(value, e.at), b = Math.max(bytesTo(value, e.end), a + 1);
      marks.replaceChildren(el("span", {}, value.slice(0, a)), el("span", { class: "mark" }, value.slice(a, b) || " "));
      marks.scrollLeft = input.scrollLeft;
    }
  }

  async function apply() {
    clearTimeout(timer);
    control?.abort();
    control = new AbortController();
    const signal = control.signal;
    try {
      await setFilter(input.value.trim(), signal);
      if (!signal.aborted) wrong(null);
    } catch (e) {
      if (!signal.aborted) wrong(e);
    }
  }

  async function suggest() {
    const value = input.value;
    const at = input.selectionStart ?? value.length;
    try {
      const found = await get("complete", { filter: value, at: bytesOf(value.slice(0, at)) });
      if (input.value !== value || document.activeElement !== input) return;
      start = bytesTo(value, found.start);
      const typed = value.slice(start, at);
      suggestions = found.suggestions.filter((s) => s.text !== typed).slice(0, 12);
    } catch {
      suggestions = [];
    }
    chosen = -1;
    drawList();
  }

  function drawList() {
    const shown = suggestions.length > 0;
    list.hidden = !shown;
    attribute(input, "aria-expanded", String(shown));
    list.keyed = undefined;
    list.replaceChildren(...suggestions.map((s, i) => el("li", { role: "option", id: "suggestion-" + i, "aria-selected": String(i === chosen), onpointerdown: (e) => {
      e.preventDefault();
      take(i);
    } }, el("span", { class: "text" }, s.text), s.about && el("span", { class: "about" }, s.about))));
    attribute(input, "aria-activedescendant", chosen >= 0 ? "suggestion-" + chosen : null);
    list.children[chosen]?.scrollIntoView({ block: "nearest" });
  }

  function take(i) {
    const s = suggestions[i];
    const at = input.selectionStart ?? input.value.length;
    const whole = /[=<>]$/.test(s.text) ? s.text : s.text + " ";
    input.value = input.value.slice(0, start) + whole + input.value.slice(at).trimStart();
    const caret = start + whole.length;
    input.setSelectionRange(caret, caret);
    changed();
  }

  function changed() {
    clear.hidden = input.value === "";
    wrong(null);
    clearTimeout(timer);
    timer = setTimeout(apply, 350);
    suggest();
  }

  function close() {
    suggestions = [];
    drawList();
  }

  input.addEventListener("input", changed);
  input.addEventListener("focus", suggest);
  input.addEventListener("blur", close);
  input.addEventListener("scroll", () => (marks.scrollLeft = input.scrollLeft));
  input.addEventListener("keydown", (e) => {
    switch (e.key) {
      case "ArrowDown":
      case "ArrowUp":
        if (!suggestions.length) return;
        e.preventDefault();
        chosen = (chosen + (e.key === "ArrowDown" ? 1 : suggestions.length + (chosen < 0 ? 0 : -1))) % suggestions.length;
        drawList();
        return;
      case "Tab":
        if (!suggestions.length || e.shiftKey || (chosen < 0 && suggestions.length > 1)) return;
        e.preventDefault();
        take(Math.max(chosen, 0));
        return;
      case "Enter":
        e.preventDefault();
        if (chosen >= 0) take(chosen);
        else close();
        apply();
        return;
      case "Escape":
        e.stopPropagation();
        if (suggestions.length) close();
        else if (input.value) {
          input.value = "";
          changed();
          apply();
        } else input.blur();
    }
  });
  clear.addEventListener("click", () => {
    input.value = "";
    changed();
    apply();
    input.focus();
  });
  on("propose", (filter) => {
    input.value = filter;
    clear.hidden = filter === "";
    close();
    apply();
  });
  on("filter", () => {
    if (document.activeElement !== input && input.value.trim() !== store.filter) input.value = store.filter;
    clear.hidden = input.value === "";
  });
  return { focus: () => input.focus() };
}
