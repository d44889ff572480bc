// Elements are made of text: names of the cluster are never read as markup.

const svgSpace = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.setAttribute("class", value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== undefined && child !== null && child !== false) node.append(child);
  }
  return node;
}

/** Returns an HTML element. Children are nodes or text. */
export const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);

/** Returns an SVG element. */
export const svg = (tag, props, ...children) => fill(document.createElementNS(svgSpace, tag), props, children);

/** Sets an element's text, if it has changed. */
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

/** Sets or removes an attribute, if it has changed. */
export function attribute(node, name, value) {
  if (value === undefined || value === null || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value);
  }
}

/**
 * Makes the children of a parent those of a list, by their keys: an element that stays
 * is kept, with its focus. make returns a new one, change brings it up to date.
 */
export function keyed(parent, list, key, make, change) {
  const old = parent.keyed ?? new Map();
  const now = new Map();
  let at = parent.firstChild;
  for (const item of list) {
    const k = key(item);
    const node = old.get(k) ?? make(item);
    now.set(k, node);
    change?.(node, item);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
  }
  for (const [k, node] of old) if (now.get(k) !== node) node.remove();
  parent.keyed = now;
}

/** Returns what calls f before the browser draws next, once for all calls until then. */
export function soon(f) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      f();
    });
  };
}
