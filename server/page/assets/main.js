// The page of a server: what it holds of the server's state, and how it shows that.
//
// Names and texts come from clients and tenants. They only ever become text.

import { HeatMap, classes, classOf, drawCurves, sample } from "./draw.js";
import { ask, count, element, follow, plural, span } from "./stream.js";

const $ = (id) => document.getElementById(id);

// pageSize is how many rows the list has at a time. How many nodes are in trouble is read out at
// most every sayEvery, and what is followed is asked for every askEvery, in milliseconds. A page
// that nobody sees stops following after hiddenFor.
const pageSize = 15, sayEvery = 10000, askEvery = 2000, hiddenFor = 60000;

const state = {
  nodes: new Map(), // by id
  sorted: [], // the nodes by name
  incoming: null, // the nodes of a first state that is not complete yet
  dirty: true, // whether sorted is out of date
  server: null,
  changes: [],
  now: 0, // the server's time, in milliseconds since 1970
  filter: "all", // see filters
  page: 0, // of the list
  list: [], // the nodes of the list in their order
  row: 0, // the row of the list that the keyboard is at
  chosen: 0, // the id of the node whose details are shown
  way: null, // what is followed: { path, parameters, title, key }
  lacks: null, // the ids of the nodes that lack it
  paused: false,
  drawn: false,
};

const map = new HeatMap($("map"));

// filters are what the list can be reduced to, by name.
const filters = {
  all: { label: "all nodes", of: () => true },
  trouble: { label: "nodes in trouble", of: (n) => classOf(n, state.now) > 0 || n.errors > 0 || n.warnings > 0 },
  lacking: { label: "nodes that lack what is followed", of: (n) => state.lacks?.has(n.id) },
  errors: { label: "nodes that cannot program something", of: (n) => n.errors > 0 },
  warnings: { label: "nodes with warnings", of: (n) => n.warnings > 0 },
};
classes.forEach((c, i) => {
  filters[c.name] = { label: `${c.label}: ${c.hint}`, of: (n) => classOf(n, state.now) === i };
});

function toNode([id, name, kind, is, lacking, errors, warnings, nodes]) {
  return { id, name, kind, state: is, lacking, errors, warnings, nodes };
}

const events = {
  reset() { state.incoming = new Map(); },
  nodes(rows) {
    const into = state.incoming ?? state.nodes;
    for (const r of rows) {
      const node = toNode(r), known = into.get(node.id);
      if (known && known.name === node.name) {
        Object.assign(known, node); // it stays where it is
      } else {
        into.set(node.id, node);
        state.dirty = true;
      }
    }
  },
  gone(ids) {
    for (const id of ids) (state.incoming ?? state.nodes).delete(id);
    state.dirty = true;
  },
  server(server) { state.server = server; },
  changes(changes) { state.changes = changes; },
  complete({ time }) {
    state.now = time;
    if (state.incoming) {
      state.nodes = state.incoming;
      state.incoming = null;
      state.dirty = true;
    }
    if (!state.paused) show();
  },
};

/** describe says in words how a node is. */
function describe(node) {
  const parts = [];
  if (node.kind === "relay") parts.push(`relay of ${plural(node.nodes, "node")}`);
  const of = classOf(node, state.now);
  if (of === 1) parts.push(node.state === "syncing" ? "receives its first state" : "programs its first state");
  else if (of === 0) parts.push("up to date");
  else parts.push(`${span(state.now - node.lacking)} behind`);
  if (node.errors) parts.push(`cannot program ${plural(node.errors, "object")}`);
  if (node.warnings) parts.push(plural(node.warnings, "warning"));
  if (state.lacks) parts.push(state.lacks.has(node.id) ? "lacks what is followed" : "has what is followed");
  return parts.join(", ");
}

/** setText changes a text only if it differs, so that nothing is read out again. */
function setText(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

function show() {
  if (state.dirty) {
    state.sorted = [...state.nodes.values()].sort((a, b) => a.name < b.name ? -1 : a.name > b.name ? 1 : a.id - b.id);
    state.dirty = false;
  }
  showServer();
  showLegend();
  drawMap();
  // The order does not change under somebody who is in the list.
  if (!$("rows").contains(document.activeElement)) sortList();
  showList();
  showChanges();
  if (!state.drawn && state.server) {
    state.drawn = true;
    performance.mark("drawn");
  }
}

function drawMap() {
  map.draw(state.sorted, state.now, state.lacks, state.chosen);
}

let saidAt = -Infinity;

function showServer() {
  const s = state.server;
  if (!s) return;
  setText($("name"), s.name);
  document.title = `${s.name} – Slicecast`;
  const facts = [
    `version ${s.version}`, s.state, `up ${span(state.now - s.started)}`, `source ${s.source}`,
    `${plural(s.services, "Service")}, ${plural(s.slices, "slice")}, ${plural(s.endpoints, "endpoint")}`, ...s.warnings,
  ];
  setText($("about"), facts.join(" · "));
  const trouble = state.sorted.filter(filters.trouble.of).length;
  let text = `${plural(s.nodes, "node")}. `;
  text += trouble ? `${count(trouble)} in trouble. ` : "All are up to date. ";
  text += s.open ? `${plural(s.open, "change")} not on all nodes yet.` : "All changes are on all nodes.";
  if (s.shown < s.clients) text += ` Only ${count(s.shown)} are shown, those in trouble first.`;
  setText($("summary"), text);
  if (performance.now() - saidAt >= sayEvery) {
    setText($("said"), trouble ? `${plural(trouble, "node")} in trouble` : "All nodes are up to date");
    $("map").setAttribute("aria-label", `Heat map of the nodes: ${text}`);
    saidAt = performance.now();
  }
}

// The legend's buttons reduce the list.
const legend = new Map();

function addLegend(name, label, hint, node, of) {
  const canvas = element("canvas"), number = element("span");
  canvas.setAttribute("aria-hidden", "true");
  const button = element("button", "", canvas, element("span", "", label), number);
  button.type = "button";
  button.title = hint;
  button.addEventListener("click", () => choose(state.filter === name ? "all" : name));
  $("legend").append(button);
  legend.set(name, { button, number, draw: () => sample(canvas, node, of) });
}

classes.forEach((c, i) => addLegend(c.name, c.label, c.hint, {}, i));
addLegend("errors", "cannot program something", "see the node's details", { errors: 1 }, 0);
addLegend("warnings", "warning", "something to mend, although everything is programmed", { warnings: 1 }, 0);

function showLegend() {
  const numbers = Object.fromEntries([...legend.keys()].map((name) => [name, 0]));
  for (const n of state.sorted) {
    numbers[classes[classOf(n, state.now)].name]++;
    if (n.errors) numbers.errors++;
    if (n.warnings) numbers.warnings++;
  }
  for (const [name, { button, number }] of legend) {
    setText(number, count(numbers[name]));
    button.setAttribute("aria-pressed", String(state.filter === name));
  }
}

for (const [name, { label }] of Object.entries(filters)) {
  const option = element("option", "", label);
  option.value = name;
  $("show").append(option);
}

function choose(filter) {
  state.filter = filter;
  state.page = state.row = 0;
  $("show").value = filter;
  sortList();
  showList();
  showLegend();
}

/** severity orders nodes in the list: those that need attention come first. */
const severity = (n) => (n.errors ? 1e6 : 0) + classOf(n, state.now) * 1e5 + (n.warnings ? 1e4 : 0);

function sortList() {
  const text = $("search").value.trim(), { of } = filters[state.filter];
  state.list = state.sorted.filter((n) => of(n) && n.name.includes(text));
  if (state.list.some(severity)) {
    const by = new Map(state.list.map((n) => [n, severity(n)]));
    state.list.sort((a, b) => by.get(b) - by.get(a) || (b.lacking ? a.lacking - b.lacking : 0)); // is stable
  }
}

function showList() {
  const pages = Math.max(1, Math.ceil(state.list.length / pageSize));
  state.page = Math.min(state.page, pages - 1);
  const first = state.page * pageSize, some = state.list.slice(first, first + pageSize), body = $("rows");
  while (body.rows.length > some.length) body.lastElementChild.remove();
  while (body.rows.length < some.length) {
    const button = element("button");
    button.type = "button";
    const head = element("th", "", button);
    head.scope = "row";
    body.append(element("tr", "", head, element("td"), element("td"), element("td"), element("td")));
  }
  state.row = Math.min(state.row, Math.max(0, some.length - 1));
  some.forEach((node, i) => {
    const row = body.rows[i], gone = !state.nodes.has(node.id);
    const button = row.cells[0].firstElementChild;
    row.className = node.id === state.chosen ? "chosen" : "";
    button.tabIndex = i === state.row ? 0 : -1;
    button.dataset.id = node.id;
    setText(button, node.name);
    const of = classOf(node, state.now);
    setText(row.cells[1], gone ? "not connected any more" : of === 0 ? "up to date" : of === 1 ? "starting" : "behind");
    setText(row.cells[2], node.lacking ? span(state.now - node.lacking) : "–");
    setText(row.cells[3], node.errors ? count(node.errors) : "–");
    setText(row.cells[4], node.warnings ? count(node.warnings) : "–");
  });
  const what = filters[state.filter].label, range = some.length ? `${count(first + 1)} to ${count(first + some.length)} of ` : "";
  const order = $("rows").contains(document.activeElement) ? "The order stands still while you are in the list."
    : "Those in trouble come first.";
  setText($("nodes-caption"), `${range}${count(state.list.length)}: ${what}. ${order}`);
  $("previous").disabled = state.page === 0;
  $("next").disabled = state.page >= pages - 1;
}

function turn(by) {
  state.page = Math.max(0, state.page + by);
  state.row = 0;
  showList();
}

const ageOf = (c) => span(Math.max(0, state.now - c.published));
const nameOf = (c) => c.services.length ? c.services.join(", ") + (c.more ? ", …" : "") : `shard ${c.shard}`;

function showChanges() {
  const list = state.changes, body = $("change-rows");
  drawCurves($("curves"), list, state.way?.key, state.now);
  const open = list.filter((c) => c.lacking).length;
  $("curves").setAttribute("aria-label",
    `Curves of the latest ${plural(list.length, "change")}; ${count(open)} not on all nodes yet. The table below has the times.`);
  setText($("changes-caption"), list.length
    ? "How long the nodes took to program each change, newest first. The last row may be the oldest that some node lacks."
    : "There was no change yet since nodes follow this server.");
  const names = [...new Set(list.flatMap((c) => c.services))];
  if (names.join() !== $("way-services").dataset.names) {
    $("way-services").dataset.names = names.join();
    $("way-services").replaceChildren(...names.map((n) => {
      const option = element("option");
      option.value = n;
      return option;
    }));
  }
  if (body.contains(document.activeElement)) return; // it would move under somebody who is in it
  while (body.rows.length > list.length) body.lastElementChild.remove();
  while (body.rows.length < list.length) {
    const button = element("button");
    button.type = "button";
    const head = element("th", "", button);
    head.scope = "row";
    body.append(element("tr", "", head, ...Array.from({ length: 7 }, (_, i) => element("td", i === 6 ? "names" : ""))));
  }
  list.forEach((c, i) => {
    const row = body.rows[i], key = `${c.shard}/${c.sequence}`;
    row.className = key === state.way?.key ? "chosen" : "";
    const button = row.cells[0].firstElementChild;
    Object.assign(button.dataset, { shard: c.shard, sequence: c.sequence });
    setText(button, nameOf(c));
    const last = c.last.map((n) => `${n.node} (${n.time === null ? "lacks it" : span(n.time)})`).join(", ");
    [ageOf(c), count(c.nodes), count(c.lacking), ...c.times.map(span), last].forEach((text, n) => setText(row.cells[n + 1], text));
  });
}

const fact = (name, value) => [element("dt", "", name), element("dd", "", value)];
const at = (ms) => `${new Date(ms).toISOString().replace("T", " ").slice(0, 19)} UTC`;

let detailAsked = 0;

/** showDetail asks for the chosen node and shows it. */
async function showDetail() {
  const id = state.chosen, mine = ++detailAsked;
  if (!id) return;
  let facts = [], problems = [];
  try {
    const n = await ask("node", { id });
    const is = n.lag === null ? n.state : `${n.state}, ${span(n.lag)} and ${plural(n.behind, "change")} behind`;
    facts = [
      ...fact("State", is), ...fact("Kind", n.kind === "relay" ? `relay of ${plural(n.nodes, "node")}` : n.kind),
      ...fact("Programmer", n.programmer || "–"), ...fact("Version", n.version || "–"), ...fact("Address", n.address),
      ...fact("Connected since", at(n.since)), ...fact("Sent", n.sent),
    ];
    const list = (title, all) => all.length ? [
      element("h3", "", title),
      element("dl", "", ...all.flatMap((p) => fact(p.about, `${p.node ? `${p.node}: ` : ""}${p.reason} (${at(p.time)})`))),
    ] : [];
    problems = [...list("Cannot program", n.errors), ...list("Warnings", n.warnings)];
    if (n.more) problems.push(element("p", "hint", "There are more. kubectl slicecast nodes -o json has all of them."));
    if (!n.errors.length && n.lastError) problems.push(...list("Last error, resolved since", [n.lastError]));
  } catch (error) {
    problems = [element("p", "alert", String(error))];
  }
  if (mine !== detailAsked) return;
  if (facts.length) $("detail-facts").replaceChildren(...facts);
  $("detail-problems").replaceChildren(...problems);
}

function chooseNode(node, focus) {
  state.chosen = node ? node.id : 0;
  $("detail").hidden = !node;
  if (node) {
    $("detail-title").textContent = node.name;
    $("detail-facts").replaceChildren();
    $("detail-problems").replaceChildren();
    showDetail();
    if (focus) $("detail-title").focus();
  }
  drawMap();
  showList();
}

let wayAsked = 0;

/** showWay asks how far what is followed has come, and shows it. */
async function showWay() {
  const way = state.way, mine = ++wayAsked;
  if (!way) return;
  let answer;
  try {
    answer = await ask(way.path, way.parameters);
  } catch (error) {
    if (mine !== wayAsked) return;
    $("way-problem").textContent = String(error);
    $("way-problem").hidden = false;
    if (!way.shown) stopWay();
    return;
  }
  if (mine !== wayAsked) return;
  $("way-problem").hidden = true;
  const first = !way.shown, s = answer.service, c = answer.change;
  way.shown = true;
  way.key = `${answer.shard}/${answer.sequence}`;
  state.lacks = new Set(answer.lacks);
  $("way-result").hidden = false;
  $("way-stop").hidden = false;
  setText($("way-name"), way.title);
  const facts = s ? [
    s.exists ? s.type : "the Service does not exist, but slices of it do", s.addresses.join(", "), s.ports.join(", "),
    `${plural(s.endpoints, "endpoint")}, ${count(s.ready)} ready, in ${plural(s.slices, "slice")}`,
  ] : [];
  facts.push(`${s ? "last changed by " : ""}sequence ${answer.sequence} of shard ${answer.shard}`);
  if (c) facts.push(`published ${span(Math.max(0, state.now - c.published))} ago`, `50 % after ${span(c.times[0])}, 99 % after ${span(c.times[1])}, all after ${span(c.times[2])}`);
  setText($("way-about"), facts.filter(Boolean).join(" · "));
  const all = Math.max(answer.nodes, answer.lacking), has = all - answer.lacking;
  $("way-progress").max = Math.max(all, 1);
  $("way-progress").value = has;
  setText($("way-state"), answer.lacking ? `${count(has)} of ${plural(all, "node")} have it; ${count(answer.lacking)} lack it, as in the list.`
    : `All ${plural(all, "node")} have it.`);
  drawMap();
  showChanges();
  if (first) {
    choose("lacking");
    $("way-name").focus();
  } else if (state.filter === "lacking" && !$("rows").contains(document.activeElement)) {
    sortList();
    showList();
  }
}

function startWay(path, parameters, title) {
  state.way = { path, parameters, title, key: "", shown: false };
  showWay();
}

function stopWay() {
  const focused = $("way").contains(document.activeElement);
  state.way = state.lacks = null;
  wayAsked++;
  $("way-result").hidden = $("way-stop").hidden = true;
  if (state.filter === "lacking") choose("all");
  drawMap();
  showChanges();
  if (focused) $("way-service").focus();
}

function announce(node) {
  setText($("announce"), node ? `${node.name}: ${describe(node)}` : "");
}

function listen() {
  $("search").addEventListener("input", () => { state.page = state.row = 0; sortList(); showList(); });
  $("show").addEventListener("change", () => choose($("show").value));
  $("previous").addEventListener("click", () => turn(-1));
  $("next").addEventListener("click", () => turn(1));
  $("rows").addEventListener("click", (e) => {
    const id = Number(e.target.closest("button")?.dataset.id);
    if (id) chooseNode(state.nodes.get(id) ?? state.list.find((n) => n.id === id), true);
  });
  $("rows").addEventListener("keydown", (e) => {
    const last = $("rows").rows.length - 1;
    const to = { ArrowDown: state.row + 1, ArrowUp: state.row - 1, Home: 0, End: last }[e.key];
    if (to === undefined && e.key !== "PageDown" && e.key !== "PageUp") return;
    e.preventDefault();
    if (to === undefined || to < 0 || to > last) {
      const by = e.key === "PageUp" || to < 0 ? -1 : 1, page = state.page;
      turn(by);
      if (state.page !== page && to < 0) state.row = pageSize - 1;
    } else {
      state.row = to;
    }
    showList();
    $("rows").rows[state.row]?.cells[0].firstElementChild.focus();
  });
  $("rows").addEventListener("focusin", (e) => {
    state.row = [...$("rows").rows].indexOf(e.target.closest("tr"));
    showList();
  });
  $("change-rows").addEventListener("click", (e) => {
    const button = e.target.closest("button");
    if (button) startWay("change", { shard: button.dataset.shard, sequence: button.dataset.sequence }, `Change of ${button.textContent}`);
  });
  $("detail-close").addEventListener("click", () => {
    chooseNode(null);
    ($("rows").rows[state.row]?.cells[0].firstElementChild ?? $("search")).focus();
  });
  $("way-form").addEventListener("submit", (e) => {
    e.preventDefault();
    const [namespace, name, ...rest] = $("way-service").value.trim().split("/");
    if (!namespace || !name || rest.length) {
      $("way-problem").textContent = "Write the Service as namespace/name.";
      $("way-problem").hidden = false;
      return;
    }
    startWay("service", { namespace, name }, `Service ${namespace}/${name}`);
  });
  $("way-stop").addEventListener("click", stopWay);
  $("pause").addEventListener("click", () => {
    state.paused = !state.paused;
    $("pause").setAttribute("aria-pressed", String(state.paused));
    if (!state.paused) show();
  });
  listenToMap();
}

function listenToMap() {
  const canvas = $("map"), tip = $("tip");
  canvas.addEventListener("keydown", (e) => {
    if (e.key === "Enter" && state.sorted[map.cursor]) {
      chooseNode(state.sorted[map.cursor], true);
    } else if (map.move(e.key)) {
      e.preventDefault();
      announce(state.sorted[map.cursor]);
      drawMap();
    }
  });
  canvas.addEventListener("focus", drawMap);
  canvas.addEventListener("blur", drawMap);
  canvas.addEventListener("mousemove", (e) => {
    const node = state.sorted[map.hit(e)];
    tip.hidden = !node;
    if (!node) return;
    setText(tip, `${node.name}: ${describe(node)}`);
    tip.style.left = `${Math.min(e.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${e.clientY + 16}px`;
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (e) => {
    const i = map.hit(e);
    if (i >= 0) {
      map.cursor = i;
      chooseNode(state.sorted[i], false);
    }
  });
  addEventListener("resize", drawMap);
  const recolor = () => {
    map.recolor();
    for (const { draw } of legend.values()) draw();
    drawMap();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  recolor();
}

function connect() {
  const stop = follow({
    event: (name, data) => events[name]?.(data),
    state(is, reason) {
      document.body.className = is;
      const text = { connecting: "Connecting", live: state.paused ? "Paused" : "Live" }[is];
      setText($("connection"), text ?? `Not connected, trying again: ${reason}`);
    },
  });
  let hidden = 0, stopped = false;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hidden);
    if (document.hidden) {
      hidden = setTimeout(() => { stop(false); stopped = true; }, hiddenFor);
    } else if (stopped) {
      stopped = false;
      stop(true);
    }
  });
  setInterval(() => {
    if (document.hidden || state.paused) return;
    showDetail();
    showWay();
  }, askEvery);
}

listen();
connect();
