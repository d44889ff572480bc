// One connection's story: each attempt, the first byte, its bytes over time, how it
// ended, and why it has this endpoint.

import { el, svg, text, attribute } from "/js/dom.js";
import { follow, get, poll, Refused } from "/js/api.js";
import { bytes, clock, ending, host, isFailure, time } from "/js/format.js";
import { reasons } from "/js/explain.js";
import { keep, recordOf } from "/js/records.js";
import { note, samples } from "/js/samples.js";
import { emit, on, select, store } from "/js/store.js";

const errors = {
  refused: "refused", timeout: "did not answer in time", reset: "reset it", unreachable: "cannot be reached",
  no_address: "not tried: no free local address", no_resources: "not tried: no descriptor or memory", denied: "not tried: a firewall rule of this node",
  dropped: "did not get it: a rule of this node drops it",
};

const culprits = { client: "The client", client_network: "The client's network", node: "This node", pod_network: "The pod's network", pod: "The pod", nobody: "Nobody" };

const W = 320, H = 80;

/** Whether a connection has its endpoint. A UDP session waits for no answer of it. */
const reached = (c) => c.connect_us !== undefined || (c.protocol === "UDP" && c.attempts > (c.failed_attempts ?? []).length);

const said = (c) => ((c.connect_us ?? c.first_byte_us) === undefined ? "chosen" : "answered");

/** The attempts and what came after, as steps in time. */
function steps(c) {
  const list = [];
  let at = 0;
  for (const f of c.failed_attempts ?? []) {
    list.push({ from: at, to: at + f.us, who: f.pod ?? f.endpoint ?? "no endpoint", place: f.endpoint, said: errors[f.error] ?? f.error, bad: true });
    at += f.us;
  }
  if (reached(c)) {
    const to = c.connect_us ?? c.first_byte_us ?? at;
    list.push({ from: Math.min(at, to), to, who: c.pod ?? c.endpoint, place: c.endpoint, said: said(c), good: true });
    at = to;
  }
  return { list, end: Math.max(at, 1) };
}

/** Returns the panel of a connection. */
export function story(selection) {
  const began = selection.seen?.time ?? selection.time; // undefined if nobody knows it
  const proxy = selection.seen?.proxy_node ?? selection.proxy; // the node, if the page is of several
  const own = proxy ? { proxy_node: proxy } : {};
  let c = recordOf(selection.id, began, proxy) ?? selection.seen ?? null;
  let gone = false;
  let why = null;
  let asked = "";
  const root = el("div", { class: "story" });
  const stops = [];

  function head() {
    const state = !c.end ? (gone ? "has ended" : c.state === "connecting" ? "connecting" : "open") : ending(c.end);
    return el("dl", { class: "facts" }, [
      ["Client", el("span", {}, el("span", { class: "code" }, c.client), c.client_node ? ", the node " + c.client_node : "", c.client_pod ? ", the pod " + c.client_pod : "", c.via ? ", by way of " + c.via : "")],
      ["Asked for", el("span", { class: "code" }, c.vip + " (" + c.vip_kind + ")")],
      ["Seen by", c.proxy_node && "the proxy of " + c.proxy_node],
      ["Service", c.service && el("button", { type: "button", class: "link", onclick: () => select({ kind: "service", key: c.service + " " + c.protocol, service: c.service, protocol: c.protocol }) }, c.service)],
      ["Reached", c.endpoint && el("button", { type: "button", class: "link", onclick: () => select({ kind: "endpoint", endpoint: c.endpoint }) }, (c.pod ?? c.endpoint) + (c.pod ? ", " + c.endpoint : ""))],
      ["On", [c.node, c.zone].filter(Boolean).join(", ")],
      ["As", c.source && (c.source === "client" ? "the client's own address" : "the node, " + (c.source_address ?? ""))],
      ["Began", clock(c.time, true)],
      ["State", el("span", { class: c.end && isFailure(c.end) ? "bad" : "" }, state)],
    ].filter(([, v]) => v).flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)]));
  }

  function attempts() {
    const { list, end } = steps(c);
    const row = (s) => {
      const bar = svg("svg", { class: "span", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { class: "track", x: 0, y: 2.5, width: 100, height: 1 }),
        svg("rect", { class: s.bad ? "fail" : "good", x: (s.from / end) * 98, y: 0, width: Math.max(2, ((s.to - s.from) / end) * 100), height: 6 }));
      return el("li", { class: s.bad ? "failed" : "" },
        el("span", { class: "who" }, s.who), el("span", { class: "said" }, (s.bad ? "✕ " : "✓ ") + s.said), bar,
        el("span", { class: "code dim" }, s.place ?? ""), el("span", { class: "took" }, (s.bad ? "after " : "at ") + time(s.bad ? s.to - s.from : s.to)));
    };
    return el("section", {}, el("h3", {}, list.length === 1 ? "One attempt" : c.attempts + " attempts"),
      el("ol", { class: "attempts" }, list.map(row), !reached(c) && !c.end && !gone && el("li", { class: "waiting" }, "waiting for an endpoint")),
      c.attempts > list.length && reached(c) && el("p", { class: "hint" }, "The log keeps the first 15 failed attempts and the last."));
  }

  function times() {
    const all = [["accepted", 0], ["the wait for an endpoint or a place ended", c.connect_us === undefined ? undefined : c.waited_us], ["an endpoint answered", c.connect_us], ["first byte of the endpoint", c.first_byte_us], [c.end ? ending(c.end) : gone ? "ended" : "now", c.duration_us]].filter(([, v]) => v !== undefined);
    return el("section", {}, el("h3", {}, "Times"), el("ol", { class: "times" }, all.map(([k, v], i) => el("li", {}, el("span", { class: "took" }, i === 0 ? clock(c.time, true) : "+ " + time(v)), el("span", {}, k)))));
  }

  /** Who delays it, or has ended it, and what TCP says of both sides. */
  function verdict() {
    if (!c.verdict) return null;
    const side = (name, of) => {
      const said = [
        ["round trip ", time, c[of + "_rtt_us"], ""], ["silent for ", time, c[of + "_idle_us"], ""], ["", bytes, c[of + "_unacked"], " not acknowledged"],
        ["", bytes, c[of + "_window"], " of window"], ["", String, c[of + "_retransmits"], " segments sent again"], ["", String, c[of + "_lost"], " of its segments lost on their way here"],
      ].filter(([, , v]) => v !== undefined).map(([before, write, v, after]) => before + write(v) + after);
      return said.length ? el("p", { class: "hint" }, name + said.join(", ")) : null;
    };
    return el("section", { class: "verdict" }, el("h3", {}, c.end ? "Who ended or delayed it" : "Who is waited for"),
      el("p", { class: "lead" }, culprits[c.verdict.who] + ": " + c.verdict.why), side("To the client: ", "client"), side("To the endpoint: ", "endpoint"));
  }

  function flow() {
    const list = [{ us: 0, from: 0, to: 0 }, ...samples(c).filter((s) => s.us <= c.duration_us), { us: c.duration_us, from: c.bytes_from_client, to: c.bytes_from_endpoint }];
    const most = Math.max(1, ...list.map((s) => Math.max(s.from, s.to)));
    const end = Math.max(1, c.duration_us);
    const d = (name) => list.map((s, i) => (i ? "L" : "M") + ((s.us / end) * W).toFixed(1) + " " + (H - 1 - (s[name] / most) * (H - 6)).toFixed(1)).join("");
    const seen = list.length > 2;
    return el("section", {}, el("h3", {}, "Bytes"),
      el("p", { class: "both" }, el("span", { class: "legend" }, el("span", { class: "name flow" }, "to the client"), el("span", { class: "value" }, bytes(c.bytes_from_endpoint))),
        el("span", { class: "legend" }, el("span", { class: "name second" }, "from the client"), el("span", { class: "value" }, bytes(c.bytes_from_client)))),
      seen
        ? el("div", { class: "plot", role: "img", "aria-label": "Bytes over time" }, svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" },
          svg("line", { class: "base", x1: 0, x2: W, y1: H - 0.5, y2: H - 0.5 }),
          svg("path", { class: "line flow", d: d("to"), "vector-effect": "non-scaling-stroke" }), svg("path", { class: "line second", d: d("from"), "vector-effect": "non-scaling-stroke" })),
        el("span", { class: "scale" }, bytes(most)))
        : el("p", { class: "hint" }, c.end ? "The page had not looked at it while it was open, so it has only the sums." : "They appear here as they come."),
      seen && el("div", { class: "axis", "aria-hidden": "true" }, el("span", {}, "0"), el("span", {}, time(c.duration_us))));
  }

  function reason() {
    if (!why) return null;
    const mark = new Map();
    for (const f of c.failed_attempts ?? []) if (f.endpoint) mark.set(f.endpoint, { text: "tried: " + (errors[f.error] ?? f.error), class: "failed" });
    if (c.endpoint && reached(c)) mark.set(c.endpoint, { text: c.affinity === "hit" ? "chosen: session affinity" : mark.size ? "chosen next, and answered" : "chosen by the balancer", class: "chosen" });
    return el("section", {}, el("h3", {}, "Why this endpoint"), sentence(), outdated(), reasons(why, mark),
      el("button", { type: "button", class: "quiet", onclick: () => {
        emit("go", "explain");
        emit("question", { from: host(c.client), to: c.vip, protocol: c.protocol });
      } }, "Open in Explain"));
  }

  /** Says that another configuration may have decided than the one that explains. */
  function outdated() {
    const text = why.service !== (c.service ?? "") ? "The address is now of " + (why.service || "no Service") + "."
      : Date.parse(why.since) > Date.parse(c.time) ? "The Service, its endpoints or the node have changed since, at " + clock(why.since, true) + ": this is how the proxy would decide now." : "";
    return text ? el("p", { class: "hint outdated" }, text) : null;
  }

  function sentence() {
    const failed = c.failed_attempts ?? [];
    const affinity = { new: "Session affinity now keeps this client here.", hit: "Session affinity had kept this client here.", moved: "Its endpoint of before could not be used, so session affinity moved it." }[c.affinity] ?? "";
    const tried = failed.length ? failed.map((f) => (f.pod ?? f.endpoint ?? "an endpoint") + " " + (errors[f.error] ?? f.error)).slice(0, 3).join(", then ") + (failed.length > 3 ? ", and more" : "") + "; " + (reached(c) ? (c.pod ?? c.endpoint) + " " + (said(c) === "chosen" ? "was chosen." : "answered.") : "none has answered.") : "";
    const both = [tried, affinity].filter(Boolean).join(" ");
    return both ? el("p", { class: "lead" }, both) : null;
  }

  function draw() {
    if (!c) {
      root.replaceChildren(el("p", { class: "empty" }, gone ? "It has ended, and the proxy no longer has its record. The connection log has it." : "Asking…"));
      return;
    }
    const parts = [head(), verdict(), attempts(), times(), flow(), reason()].filter(Boolean);
    const focused = root.contains(document.activeElement) ? [...root.querySelectorAll("button")].indexOf(document.activeElement) : -1;
    root.replaceChildren(...parts);
    root.querySelectorAll("button")[focused]?.focus();
    explain();
  }

  async function explain() {
    const question = host(c.client) + " " + c.vip;
    if (asked === question) return;
    asked = question;
    try {
      why = await get("explain", { ...own, protocol: c.protocol.toLowerCase(), from: host(c.client), to: c.vip });
      draw();
    } catch {
      asked = question; // an older proxy, or a question that it does not take
    }
  }

  /** Asks for the verdict about a record that came by another way than its number. */
  async function judge() {
    try {
      const kept = await get("connections/" + selection.id, own);
      if (kept.time !== c.time || !kept.verdict) return;
      c = { ...c, verdict: kept.verdict };
      draw();
    } catch {
      // the proxy no longer keeps the record
    }
  }

  const ended = (r) => {
    if (!r.end || r.time !== (c?.time ?? began ?? r.time)) return;
    keep(r);
    c = r;
    for (const stop of stops) stop();
    draw();
    if (!c.verdict) judge();
  };

  if (c?.end) {
    if (!c.verdict) judge();
  } else {
    const asking = poll(500, async (signal) => {
      try {
        const now = { ...(await get("connections/" + selection.id, own, signal)), ...own };
        if (now.time === (c?.time ?? began ?? now.time)) {
          if (now.end) return ended(now); // the proxy keeps its record
          c = now;
          note(c);
          return draw();
        } // else the proxy has started again, and the number is another connection's
      } catch (error) {
        if (signal.aborted || !(error instanceof Refused) || error.status !== 404) return;
      }
      gone = true;
      const record = recordOf(selection.id, c?.time ?? began, proxy);
      if (record) return ended(record);
      draw();
      asking.stop();
    });
    stops.push(asking.stop, follow("tap", { ...own, filter: "id=" + selection.id }, (r) => ended({ ...r, ...own })));
  }
  let applied = store.status?.applied;
  const stopStatus = on("status", () => {
    if (store.status.applied === applied) return;
    applied = store.status.applied;
    asked = ""; // for the explanation of now
    draw();
  });
  draw();
  return {
    root,
    title: "Connection " + selection.id,
    kind: "Connection",
    stop() {
      for (const stop of stops) stop();
      stopStatus();
    },
  };
}
