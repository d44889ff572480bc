// The explain box: from, to, and the reasons.

import { el, text } from "/js/dom.js";
import { get } from "/js/api.js";
import { drawName, stateOf } from "/js/tables.js";
import { emit, on, store } from "/js/store.js";

const verdicts = {
  accept: "Accepted: it reaches one of the candidates",
  refuse: "Refused: the client's connect fails at once",
  drop: "Dropped: the client gets no answer",
  none: "Left alone: no Service has this address and port",
};

/** The endpoint of the configuration with an address, of a Service if it is known. */
function known(address, service) {
  let found = null;
  for (const s of store.services) {
    for (const e of s.endpoints) {
      if (e.endpoint !== address) continue;
      if (s.service === service) return e;
      found ??= e;
    }
  }
  return found;
}

/** Returns what an answer of /v1/explain says. mark names endpoints: its text by address. */
export function reasons(a, mark = new Map()) {
  const rows = [["Because", a.reason]];
  if (a.service) rows.push(["Service", a.service + ", by its " + a.address]);
  if (a.policy) rows.push(["Traffic policy", a.policy]);
  if (a.affinity) rows.push(["Session affinity", a.affinity]);
  if (a.source) rows.push(["Seen as", a.source === "client" ? "the client's address" : "the node's address"]);
  if (a.rules?.length) rows.push(["Rules", a.rules.join(", ")]);
  const candidates = a.candidates?.length
    ? el("div", {}, el("h4", {}, a.candidates.length === 1 ? "The one candidate" : a.candidates.length + " candidates"),
      el("ul", { class: "candidates" }, a.candidates.map((c) => {
        const e = known(c, a.service);
        const name = el("span", { class: "who" });
        drawName(name, e?.pod ?? c);
        const said = mark.get(c);
        return el("li", { class: said?.class ?? "" }, name, e?.pod && el("span", { class: "code dim" }, c), el("span", { class: "said" }, said?.text ?? (e && stateOf(e) !== "ready" ? stateOf(e) : "")));
      })))
    : null;
  return el("div", { class: "reasons" }, el("dl", { class: "facts" }, rows.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])), candidates);
}

export function explainView() {
  const field = (label, id, placeholder) => {
    const input = el("input", { id, type: "text", class: "code", placeholder, spellcheck: "false", autocomplete: "off", required: true });
    return [input, el("label", { for: id }, label, input)];
  };
  const [from, fromField] = field("From, the client's address", "explain-from", "10.244.0.11");
  const [to, toField] = field("To, address and port", "explain-to", "10.96.0.10:80");
  to.setAttribute("list", "explain-places");
  const places = el("datalist", { id: "explain-places" });
  const protocol = el("select", { id: "explain-protocol" }, ["tcp", "udp", "sctp"].map((p) => el("option", { value: p }, p.toUpperCase())));
  const result = el("div", { class: "result", "aria-live": "polite" });
  const form = el("form", { class: "ask" }, fromField, toField, places, el("label", { for: "explain-protocol" }, "Protocol", protocol), el("button", { type: "submit", class: "primary" }, "Explain"));
  const root = el("div", { class: "explain" },
    el("div", {}, el("h2", {}, "What happens to a connection, and why"),
      el("p", { class: "lead" }, "The answer is from the policy that is in force on this node now. No packet is sent.")), form, result);

  async function ask(e) {
    e?.preventDefault();
    store.question = { protocol: protocol.value, from: from.value.trim(), to: to.value.trim() };
    emit("asked");
    try {
      const a = await get("explain", store.question);
      const verdict = el("h3", { class: "verdict " + a.verdict });
      text(verdict, verdicts[a.verdict] ?? a.verdict);
      result.replaceChildren(verdict, reasons(a));
    } catch (error) {
      result.replaceChildren(el("p", { class: "wrong" }, error.message));
    }
  }
  form.addEventListener("submit", ask);

  function suggest() {
    const list = store.services.slice(0, 300).flatMap((s) => (s.vips ?? []).map((v) => [v.includes(":") ? `[${v}]:${s.port}` : `${v}:${s.port}`, s.service]));
    places.replaceChildren(...list.map(([value, label]) => el("option", { value }, label)));
  }
  on("services", () => root.isConnected && places.childElementCount === 0 && suggest());
  on("question", (q) => {
    from.value = q.from;
    to.value = q.to;
    protocol.value = q.protocol.toLowerCase();
    ask();
  });
  return { root, show: suggest, hide() {} };
}
