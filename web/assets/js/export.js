// Files of connections for other programs: CSV and JSON.

import { el } from "/js/dom.js";

/** The columns of CSV, as sluice conns -o csv has them: the fields of JSON. */
export const columns = [
  "time", "id", "state", "protocol", "path", "client", "client_node", "client_pod", "via", "vip", "vip_kind", "service", "endpoint", "pod", "node", "zone", "source", "source_address", "affinity",
  "attempts", "failed_attempts", "waited_us", "connect_us", "first_byte_us", "duration_us", "bytes_from_client", "bytes_from_endpoint", "datagrams_from_client", "datagrams_from_endpoint",
  "messages_from_client", "messages_from_endpoint", "streams_from_client", "streams_to_client",
  "idle_us", "client_rtt_us", "client_idle_us", "client_unacked", "client_unsent", "client_window", "client_retransmits", "client_lost",
  "endpoint_rtt_us", "endpoint_idle_us", "endpoint_unacked", "endpoint_unsent", "endpoint_window", "endpoint_retransmits", "endpoint_lost", "packets", "end",
];

const columnsOf = (list) => (list[0]?.proxy_node ? [...columns, "proxy_node"] : columns); // as kubectl sluice conns

const most = 10000; // connections of a file

const cell = (v) => {
  const said = v === undefined ? "" : Array.isArray(v) ? v.map((f) => [f.endpoint, f.pod, f.error, f.us].filter((x) => x !== undefined).join(" ")).join("; ") : String(v);
  return /[",\n\r]/.test(said) ? '"' + said.replaceAll('"', '""') + '"' : said;
};

/** Returns connections as comma-separated values. */
export const csv = (list) => [columnsOf(list), ...list.map((c) => columnsOf(list).map((name) => c[name]))].map((row) => row.map(cell).join(",") + "\n").join("");

/** Returns connections as lines of JSON. */
export const json = (list) => list.map((c) => JSON.stringify(Object.fromEntries(columnsOf([c]).filter((name) => c[name] !== undefined).map((name) => [name, c[name]]))) + "\n").join("");

function save(name, type, content) {
  const href = URL.createObjectURL(new Blob([content], { type }));
  el("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60000);
}

/** Returns the buttons that save what get returns, at most so many connections. */
export function exporter(name, get) {
  const button = (label, type, encode) => {
    const made = el("button", { type: "button", class: "quiet", title: `Saves what the filter selects, at most ${most.toLocaleString("en")} ${name}`, onclick: async () => {
      made.disabled = true;
      try {
        save("sluice-" + name + "." + label.toLowerCase(), type, encode(await get(most, new AbortController().signal)));
      } catch (error) {
        made.title = error.message;
      } finally {
        made.disabled = false;
      }
    } }, "Save " + label);
    return made;
  };
  return el("span", { class: "exports" }, button("CSV", "text/csv", csv), button("JSON", "application/x-ndjson", json));
}
