"use strict";
// The page: its tabs, and the keys that work on all of them. The address keeps the tab, so that a reload stays there.

const data = JSON.parse(document.getElementById("data").textContent);
const episodes = JSON.parse(document.getElementById("episodes").textContent);
const samples = new Samples(data, episodes);
const main = document.getElementById("main");

const runName = (run) => (data.runs.length > 1 ? `${run.name}: ` : "");
const color = (phase) => data.colors[phase] || "#66727f";

/** The curve of a metric in each run; the second run is dashed. */
function seriesOf(names, first = 0) {
  return Object.entries(names).flatMap(([name, label], at) =>
    data.runs.filter((run) => name in run.metrics).map((run) => ({
      label: runName(run) + label, color: SERIES[(first + at) % SERIES.length], dash: data.runs.indexOf(run) > 0, xs: run.metrics[name][0], ys: run.metrics[name][1],
    })));
}

function curves() {
  const panels = data.panels.map((panel) => ({ title: panel.title, kind: "lines", log: panel.scale === "log", series: seriesOf(panel.names) }));
  const shown = new Set(data.panels.flatMap((panel) => Object.keys(panel.names)));
  const others = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => !shown.has(name)).sort();
  const search = make("input", { type: "search", id: "metric", placeholder: `search ${others.length} other metrics`, title: "search metrics" });
  const more = make("div", { id: "more" });
  const list = () => {
    const found = search.value ? others.filter((name) => name.includes(search.value)) : [];
    more.replaceChildren(chartGrid(found.slice(0, 60).map((name) => ({ title: name, kind: "lines", series: seriesOf({ [name]: name }) }))));
  };
  search.addEventListener("input", list);
  main.append(chartGrid(panels), make("h2", { textContent: "Other metrics" }), make("div", { className: "filters" }, search), more);
}

function time() {
  const specs = data.runs.map((run) => ({
    title: `${runName(run)}seconds of each step, by phase`, kind: "stack", tall: true,
    series: data.stacked.filter((phase) => `timing_s/${phase}` in run.metrics).map((phase) => ({ label: phase, color: color(phase), xs: run.metrics[`timing_s/${phase}`][0], ys: run.metrics[`timing_s/${phase}`][1] })),
  }));
  for (const run of data.runs.filter((one) => one.calls.length)) {
    const lanes = [...new Set(run.calls.map((call) => call.lane))].sort((a, b) => (a === "driver") - (b === "driver"));
    const phases = [...new Set(run.calls.map((call) => call.name))];
    specs.push({
      title: `${runName(run)}calls of the last steps, by pool and replica`, kind: "lanes", lanes,
      bars: run.calls.map((call) => ({ lane: lanes.indexOf(call.lane), label: call.name, color: color(call.name), start: call.start, stop: call.stop })),
      legend: phases.map((phase) => ({ label: phase, color: color(phase) })),
    });
  }
  main.append(chartGrid(specs));
}

function steps() {
  const all = [...new Set(data.runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
  const select = make("select", { id: "step" });
  all.forEach((step) => select.append(make("option", { value: step, textContent: `step ${step}` })));
  select.value = all[all.length - 1];
  const search = make("input", { type: "search", id: "metric", placeholder: "search metrics", title: "search metrics" });
  const table = make("table", { id: "step-table" });
  const fill = () => {
    const step = Number(select.value), before = all[all.indexOf(step) - 1];
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].sort().filter((name) => name.includes(search.value));
    const head = make("tr", {}, make("th", { textContent: "metric" }), ...data.runs.map((run) => make("th", { textContent: data.runs.length > 1 ? run.name : "value" })), make("th", { textContent: data.runs.length > 1 ? "difference" : before === undefined ? "" : `change since step ${before}` }));
    const at = (run, name, wanted) => { const [steps, values] = run.metrics[name] || [[], []]; return values[steps.indexOf(wanted)]; };
    const rows = names.map((name) => {
      const values = data.runs.map((run) => at(run, name, step));
      const [low, high] = data.runs.length > 1 ? values : [at(data.runs[0], name, before), values[0]];
      const change = isNumber(low) && isNumber(high) ? high - low : undefined;
      return make("tr", {}, make("td", { textContent: name }), ...[...values, change].map((value) => { const cell = make("td", { className: "number", textContent: short(value) }); if (isNumber(value)) { cell.title = String(value); cell.dataset.value = String(value); } return cell; }));
    }).filter((row) => [...row.children].some((cell) => cell.dataset.value !== undefined));
    table.replaceChildren(head, ...rows);
  };
  select.addEventListener("change", fill);
  search.addEventListener("input", fill);
  main.append(make("div", { className: "filters" }, select, search), make("div", { className: "scroll" }, table));
  fill();
}

function plan() {
  for (const run of data.runs) {
    const table = make("table", { className: "plan" });
    table.append(make("tr", {}, ...["phase", "", "planned", "measured", "measured / planned"].map((text) => make("th", { textContent: text }))));
    for (const row of run.plan) {
      const swatch = make("span", { className: "swatch" });
      swatch.style.background = color(row.phase);
      const numbers = [row.planned, row.measured, isNumber(row.planned) && row.planned > 0 && isNumber(row.measured) ? row.measured / row.planned : undefined];
      table.append(make("tr", {}, make("td", {}, swatch, row.phase), make("td", { textContent: row.unit }), ...numbers.map((value) => { const cell = make("td", { className: "number", textContent: short(value) }); if (isNumber(value)) cell.title = String(value); return cell; })));
    }
    main.append(make("h2", { textContent: `${runName(run)}planned and measured` }), make("p", { className: "faint", textContent: "GB: of the fullest rank, in the fullest step. Seconds: of the median step." }), make("div", { className: "scroll" }, table));
    main.append(make("h2", { textContent: `${runName(run)}summary` }), make("div", { className: "scroll" }, numberTable(Object.entries(run.summary))));
  }
  if (data.differences.length) {
    const table = make("table", { id: "differences" });
    table.append(make("tr", {}, ...["key", ...data.runs.map((run) => run.name)].map((text) => make("th", { textContent: text }))));
    for (const row of data.differences) table.append(make("tr", {}, ...row.map((value) => make("td", { textContent: typeof value === "string" ? value : JSON.stringify(value) ?? "" }))));
    main.append(make("h2", { textContent: "Keys that differ" }), make("div", { className: "scroll" }, table));
  }
}

const TABS = { curves, time, steps, samples: () => samples.show(main), plan };
const KEYS = [["1 to 5", "go to a tab"], ["j, k", "next and previous sample"], ["← →", "next and previous token, or a chart's cursor"], ["c", "next colour of tokens"], ["/", "search"], ["+ − 0", "zoom a chart that has the focus, and back"], ["d", "dark or light"], ["?", "this list"]];
let open = "";

function go(name) {
  open = name in TABS ? name : "curves";
  history.replaceState(null, "", `#${open}`);
  document.querySelectorAll("[role=tab]").forEach((tab) => tab.setAttribute("aria-selected", tab.dataset.tab === open));
  main.replaceChildren();
  TABS[open]();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  document.querySelectorAll(".chart").forEach((host) => host.chart && host.chart.draw());
}

document.getElementById("runs").textContent = data.runs.map((run) => `${run.name} (step ${run.steps[run.steps.length - 1]}${run.ended ? "" : ", not ended"})`).join("  |  ");
for (const name of Object.keys(TABS)) {
  const tab = make("button", { textContent: name });
  tab.setAttribute("role", "tab");
  tab.dataset.tab = name;
  tab.addEventListener("click", () => go(name));
  document.getElementById("tabs").append(tab);
}
for (const [key, text] of KEYS) document.getElementById("keytable").append(make("tr", {}, make("th", { textContent: key }), make("td", { textContent: text })));
const flip = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
document.getElementById("theme").addEventListener("click", flip);
document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
  const tab = Object.keys(TABS)[Number(event.key) - 1];
  const search = document.querySelector("input[type=search]");
  if (tab) go(tab);
  else if (event.key === "d") flip();
  else if (event.key === "?") document.getElementById("keys").showModal();
  else if (event.key === "/" && search) search.focus();
  else if (open !== "samples") return;
  else if (event.key === "j" || event.key === "ArrowDown") samples.choose(samples.chosen + 1);
  else if (event.key === "k" || event.key === "ArrowUp") samples.choose(samples.chosen - 1);
  else if (event.key === "ArrowRight" || event.key === "ArrowLeft") samples.move(event.key === "ArrowRight" ? 1 : -1);
  else if (event.key === "c") samples.nextColour();
  else return;
  event.preventDefault();
});
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
go(location.hash.slice(1));
document.documentElement.dataset.ready = "yes";
