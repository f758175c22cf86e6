// Asks for /console/data.json every two seconds and shows it. Text from the daemon is only ever text.
"use strict";

const EVERY_MS = 2000;
const KEPT = 120;
const history = { hit: [], saved: [], lookups: [] };
let before = null;

const id = (name) => document.getElementById(name);
const bytes = (n) => {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= size) return (n / size).toPrecision(3) + " " + unit;
  return n + " B";
};
const seconds = (s) => s === null ? "" : s >= 1 ? s.toFixed(2) + " s" : (s * 1000).toFixed(s < 0.01 ? 2 : 0) + " ms";
const percent = (r) => (100 * r).toFixed(1) + " %";
const count = (n) => Math.round(n).toLocaleString("en");

// Columns are [title, cell(row) -> text or node, "number" if it is one].
function table(name, rows, columns, none) {
  const head = document.createElement("tr");
  for (const [title, , kind] of columns) {
    const cell = document.createElement("th");
    cell.textContent = title;
    if (kind) cell.className = kind;
    head.append(cell);
  }
  const lines = rows.map((row) => {
    const line = document.createElement("tr");
    for (const [, show, kind] of columns) {
      const cell = document.createElement("td"), value = show(row);
      if (value instanceof Node) cell.append(value); else cell.textContent = value;
      if (kind) cell.className = kind;
      if (value === "degraded") cell.className = "bad";
      line.append(cell);
    }
    return line;
  });
  if (!rows.length) {
    const line = document.createElement("tr"), cell = document.createElement("td");
    cell.colSpan = columns.length;
    cell.textContent = none;
    line.append(cell);
    lines.push(line);
  }
  id(name).replaceChildren(head, ...lines);
}

function meter(value, max) {
  const node = document.createElement("meter");
  node.max = max || 1;
  node.value = value;
  node.title = bytes(value) + " of " + bytes(max);
  return node;
}

function line(name, values) {
  const top = Math.max(...values, 1e-9);
  const points = values.map((v, i) => `${(240 * i / (KEPT - 1)).toFixed(1)},${(46 - 44 * v / top).toFixed(1)}`);
  const node = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  node.setAttribute("points", points.join(" "));
  id(name).replaceChildren(node);
}

function keep(name, value) {
  history[name].push(value);
  if (history[name].length > KEPT) history[name].shift();
}

const total = (values) => Object.values(values).reduce((a, b) => a + b, 0);

function worth(data) {
  const s = data.status, now = { hits: total(data.hit_tokens), tokens: s.counters.kvstore_lookup_tokens_total, lookups: s.counters.kvstore_lookups_total, at: s.uptime_seconds };
  const last = before && before.at < now.at ? before : null;
  if (last) {
    const tokens = now.tokens - last.tokens;
    keep("hit", tokens ? (now.hits - last.hits) / tokens : history.hit.at(-1) || 0);
    keep("lookups", (now.lookups - last.lookups) / (now.at - last.at));
  }
  const live = s.shadows[0];
  keep("saved", live ? live.saved_seconds_per_second : 0);
  before = now;
  id("hit-ratio").textContent = now.tokens ? percent(now.hits / now.tokens) : "–";
  id("saved").textContent = live ? live.saved_seconds_per_second.toPrecision(2) : "–";
  id("lookups").textContent = history.lookups.length ? history.lookups.at(-1).toFixed(1) : "–";
  line("hit-line", history.hit);
  line("saved-line", history.saved);
  line("lookups-line", history.lookups);
}

function show(data) {
  const s = data.status;
  id("version").textContent = s.version;
  id("state").textContent = `${s.state}${s.reason ? ": " + s.reason : ""} · up ${count(s.uptime_seconds)} s · ${s.session_count} sessions, ${s.lease_count} leases · policy ${s.policy}${s.policy_reason ? " (" + s.policy_reason + ")" : ""}`;
  id("state").className = s.state === "serving" ? "" : "bad";
  worth(data);
  table("tiers", Object.entries(s.tiers), [
    ["tier", ([name]) => name], ["", ([, t]) => meter(t.used_bytes, t.capacity_bytes)],
    ["used", ([, t]) => bytes(t.used_bytes), "number"], ["of", ([, t]) => bytes(t.capacity_bytes), "number"],
    ["blocks", ([, t]) => count(t.block_count), "number"], ["state", ([, t]) => t.state]], "none");
  const used = Object.keys(data.links).filter((l) => data.links[l].copied_bytes || data.links[l].queued_bytes);
  table("links", used, [
    ["link", (l) => l], ["copied", (l) => bytes(data.links[l].copied_bytes), "number"],
    ["queued", (l) => bytes(data.links[l].queued_bytes), "number"]], "nothing was copied yet");
  id("what-if").textContent = s.what_if;
  table("shadows", s.shadows, [
    ["policy", (x) => x.policy], ["tier", (x) => x.tier], ["capacity", (x) => "× " + x.capacity_ratio, "number"],
    ["tokens found", (x) => percent(x.token_hit_ratio), "number"],
    ...("hbm" in s.tiers ? [["of it in hbm", (x) => percent(x.hbm_token_hit_ratio), "number"]] : []),
    ["saves", (x) => x.saved_seconds_per_second.toPrecision(2) + " s/s", "number"]], "no request was followed yet");
  table("decisions", data.decisions, [
    ["request", (d) => d.request_id || "–"], ["when", (d) => new Date(1000 * d.wall_seconds).toLocaleTimeString("en-GB")],
    ["model", (d) => d.model], ["matched", (d) => count(d.matched_tokens), "number"], ["plan", (d) => d.kind],
    ["restores", (d) => count(d.restore_tokens), "number"], ["predicted", (d) => seconds(d.predicted_seconds), "number"],
    ["measured", (d) => seconds(d.measured_seconds), "number"], ["why", (d) => d.reason]], "no lookup yet");
  table("costs", s.costs, [
    ["of", (c) => c.subject + (c.device ? " on " + c.device : "")], ["state", (c) => c.state],
    ["predicts", (c) => seconds(c.predicted_seconds) + (c.unit === "tokens" ? " for 8,192 tokens" : " a GiB"), "number"],
    ["samples", (c) => count(c.sample_count), "number"], ["", (c) => c.reason]], "nothing is measured yet");
  table("spaces", s.spaces, [
    ["model", (x) => x.model], ["revision", (x) => x.revision.slice(0, 12)], ["tenant", (x) => x.tenant],
    ["blocks", (x) => count(x.block_count), "number"],
    ["bytes", (x) => Object.entries(x.used_bytes).map(([t, n]) => `${t} ${bytes(n)}`).join(", ")],
    ["attached", (x) => x.attachment_count, "number"]], "no engine was attached yet");
  table("tenants", s.tenants, [
    ["tenant", (x) => x.tenant], ["pool", (x) => x.isolated ? "its own" : "shared"],
    ["used", (x) => Object.entries(x.used_bytes).map(([t, n]) => `${t} ${bytes(n)}`).join(", ")],
    ["caps", (x) => Object.entries(x.cap_bytes).map(([t, n]) => `${t} ${bytes(n)}`).join(", ")],
    ["floors", (x) => Object.entries(x.floor_bytes).map(([t, n]) => `${t} ${bytes(n)}`).join(", ")]], "none");
  document.body.dataset.ready ||= Math.round(performance.now());
}

async function ask() {
  try {
    const answer = await fetch("/console/data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    show(await answer.json());
  } catch (error) {
    id("state").textContent = "no answer: " + error.message;
    id("state").className = "bad";
  }
  setTimeout(ask, EVERY_MS);
}

ask();
