"use strict";
// Samples: filters, a list of which only the rows in sight exist, and the chosen sample with its tokens in colours.

const ROW = 44;
const DIVERGING = new Set(["difference", "advantages", "rewards", "returns", "old_values", "loss_terms", "turn_rewards"]);
const AROUND_ONE = new Set(["ratio", "rollout_weights"]);

class Samples {
  constructor(data, episodes) {
    this.data = data;
    this.all = episodes;
    this.shown = episodes;
    this.chosen = 0;
    this.token = null;
    this.colour = "advantages";
    this.texts = episodes.map((one) => `${one.prompt}\n${one.answer}\n${one.ground_truth}\n${(one.tokens || []).join("")}`.toLowerCase());
    this.places = new Map(episodes.map((one, at) => [this.place(one, one.run), at]));
  }

  place(one, run) { return [run, one.kind, one.step, one.prompt_index ?? one.prompt, one.number_in_group ?? one.sample].join("\u0000"); }

  show(host) {
    host.replaceChildren();
    this.count = make("span", { className: "faint", id: "count" });
    this.list = make("div", { id: "list", tabIndex: 0, role: "listbox" });
    this.list.setAttribute("aria-label", "samples");
    this.space = make("div", { id: "space" });
    this.list.append(this.space);
    this.detail = make("div", { id: "detail" });
    host.append(this.filters(), this.count, make("div", { className: "panes" }, this.list, this.detail));
    this.list.addEventListener("scroll", () => this.rows());
    new ResizeObserver(() => this.rows()).observe(this.list);
    this.filter();
  }

  filters() {
    const values = (name) => [...new Set(this.all.map((one) => one[name]))].sort((a, b) => (isNumber(a) ? a - b : String(a) < String(b) ? -1 : 1));
    const choice = (name, label, names) => {
      const select = make("select", { id: `by-${name}`, title: label });
      select.append(make("option", { value: "", textContent: `any ${label}` }));
      values(name).forEach((value) => select.append(make("option", { value: String(value), textContent: names ? names[value] : String(value) })));
      select.addEventListener("change", () => this.filter());
      return select;
    };
    const number = (id, label) => make("input", { type: "number", id, placeholder: label, title: label, step: "any" });
    this.search = make("input", { type: "search", id: "search", placeholder: "search texts ( / )", title: "search texts" });
    this.least = number("least", "reward ≥");
    this.most = number("most", "reward ≤");
    for (const input of [this.search, this.least, this.most]) input.addEventListener("input", () => this.filter());
    this.choices = { data_source: choice("data_source", "source"), step: choice("step", "step"), outcome: choice("outcome", "outcome"), kind: choice("kind", "kind") };
    if (this.data.runs.length > 1) this.choices.run = choice("run", "run", this.data.runs.map((run) => run.name));
    const colours = make("select", { id: "colour", title: "colour of tokens (c)" });
    for (const [name, label] of this.colours()) colours.append(make("option", { value: name, textContent: `colour: ${label}` }));
    if (![...colours.options].some((option) => option.value === this.colour) && colours.options.length) this.colour = colours.options[0].value;
    colours.value = this.colour;
    colours.addEventListener("change", () => { this.colour = colours.value; this.life(); });
    this.colourSelect = colours;
    return make("div", { className: "filters" }, this.search, this.least, this.most, ...Object.values(this.choices), colours);
  }

  /** Names of numbers that some sample has, with labels; first whether a token was sampled. */
  colours() {
    const known = new Set(this.all.flatMap((one) => Object.keys(one.numbers || {})));
    const numbers = Object.entries(this.data.token_numbers).filter(([name]) => known.has(name));
    return known.size ? [...numbers, ["sampled", "sampled or read"]] : [];
  }

  filter() {
    const text = this.search.value.toLowerCase(), least = this.least.value, most = this.most.value;
    const wanted = Object.entries(this.choices).filter(([, select]) => select.value !== "");
    this.shown = this.all.filter((one, at) =>
      (!text || this.texts[at].includes(text)) && (least === "" || one.score >= Number(least)) && (most === "" || one.score <= Number(most)) &&
      wanted.every(([name, select]) => String(one[name]) === select.value));
    this.chosen = 0;
    this.token = null;
    this.count.textContent = `${this.shown.length} of ${this.all.length} samples here; ${this.data.total_samples} in the files`;
    this.list.scrollTop = 0;
    this.rows();
    this.life();
  }

  rows() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 3), last = Math.min(this.shown.length, first + Math.ceil(this.list.clientHeight / ROW) + 6);
    this.space.style.height = `${this.shown.length * ROW}px`;
    this.space.replaceChildren(...this.shown.slice(first, last).map((one, at) => this.row(one, first + at)));
  }

  row(one, at) {
    const run = this.data.runs.length > 1 ? `${this.data.runs[one.run].name} · ` : "";
    const head = `${run}step ${one.step} · ${short(one.score)} · ${one.outcome} · ${one.data_source}${one.kind === "training" ? "" : ` · ${one.kind}`}`;
    const row = make("div", { className: "row", role: "option" }, make("div", { className: "faint", textContent: head }), make("div", { className: "text", textContent: `${one.prompt} → ${one.answer}` }));
    row.style.top = `${at * ROW}px`;
    row.setAttribute("aria-selected", at === this.chosen);
    row.addEventListener("click", () => this.choose(at));
    return row;
  }

  choose(at) {
    if (at < 0 || at >= this.shown.length) return;
    this.chosen = at;
    this.token = null;
    const top = at * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
    this.rows();
    this.life();
  }

  life() {
    this.detail.replaceChildren();
    const one = this.shown[this.chosen];
    if (!one) return;
    const beside = this.data.runs.map((_, run) => (run === one.run ? one : this.all[this.places.get(this.place(one, run))]));
    this.detail.append(...beside.filter(Boolean).map((sample) => this.card(sample)));
  }

  card(one) {
    const card = make("div", { className: "life" });
    const where = this.data.runs.length > 1 ? `${this.data.runs[one.run].name}: ` : "";
    card.append(make("h3", { textContent: `${where}step ${one.step}, sample ${one.sample}` }));
    const facts = [["score", one.score], ["outcome", one.outcome], ["source", one.data_source], ["truth", one.ground_truth], ...Object.entries(one.rewards || {})];
    if (one.numbers) facts.push(["loss", one.loss], ["share of the loss", one.share], ["scores of its group", one.group_scores.map(short).join(" ")]);
    card.append(numberTable(facts));
    const pictures = (this.data.pictures || [])[one.run] || {};
    for (const name of one.images || []) if (pictures[name]) card.append(make("img", { className: "picture", alt: name, src: `data:image/png;base64,${pictures[name]}` }));
    if (!one.tokens) {
      card.append(make("h2", { textContent: "prompt" }), make("div", { className: "text read", textContent: one.prompt }), make("h2", { textContent: "response" }), make("div", { className: "text turn", textContent: one.answer }));
      return card;
    }
    const about = make("div", { className: "token-numbers" });
    card.append(this.scale(one), this.turns(one, about), about);
    return card;
  }

  /** Runs of sampled tokens are turns; between them is what the policy has read. */
  turns(one, about) {
    const host = make("div", { className: "tokens" });
    const values = this.values(one), [low, high] = spread(values);
    let block = null, drawn = null, place = 0;
    one.tokens.forEach((text, at) => {
      const isDrawn = Boolean(one.sampled[at]);
      if (isDrawn !== drawn) {
        block = make("div", { className: isDrawn ? "text turn" : "text read" });
        host.append(block);
        drawn = isDrawn;
      }
      const token = make("span", { className: "tok", textContent: text });
      const number = isDrawn ? place++ : null;
      token.dataset.at = at;
      if (number !== null) {
        token.dataset.number = number;
        const value = values[number];
        if (isNumber(value)) { token.dataset.value = value; token.style.background = paint(this.colour, value, low, high); }
      } else if (this.colour === "sampled") token.style.background = "transparent";
      token.addEventListener("click", () => this.about(host, one, at, about));
      block.append(token);
    });
    return host;
  }

  about(host, one, at, about) {
    host.querySelectorAll(".chosen").forEach((token) => token.classList.remove("chosen"));
    const token = host.querySelector(`[data-at="${at}"]`);
    if (!token) return;
    token.classList.add("chosen");
    this.token = at;
    const number = token.dataset.number;
    const numbers = number === undefined ? [["sampled", "no: the policy has read it"]] : Object.entries(one.numbers).map(([name, values]) => [this.data.token_numbers[name], values[number]]);
    about.replaceChildren(make("h2", { textContent: `token ${at}: ${JSON.stringify(one.tokens[at])}` }), numberTable(numbers));
  }

  /** Go to the next or previous token of the first card. */
  move(by) {
    const one = this.shown[this.chosen], card = this.detail.querySelector(".life");
    if (!one || !card || !one.tokens) return;
    const shown = this.detail.children.length > 1 ? this.all[this.places.get(this.place(one, 0))] || one : one;
    const at = this.token === null ? shown.sampled.findIndex(Boolean) : Math.min(shown.tokens.length - 1, Math.max(0, this.token + by));
    this.about(card.querySelector(".tokens"), shown, Math.max(0, at), card.querySelector(".token-numbers"));
  }

  values(one) {
    if (this.colour === "sampled") return one.sampled.filter(Boolean).map(Number);
    return one.numbers[this.colour] || [];
  }

  scale(one) {
    const values = this.values(one).filter(isNumber), [low, high] = spread(values);
    const bar = make("span", { className: "scale" });
    if (values.length) bar.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map((share) => paint(this.colour, low + share * (high - low), low, high)).join(",")})`;
    const label = this.data.token_numbers[this.colour] || "sampled";
    return make("div", { className: "faint" }, values.length ? `${label}: ${short(low)} ` : `${label}: not recorded `, bar, values.length ? ` ${short(high)}` : "");
  }

  nextColour() {
    const select = this.colourSelect;
    if (!select.options.length) return;
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    this.colour = select.value;
    this.life();
  }
}

function spread(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

/** Teal above the middle and red below it where numbers have a sign; else the more, the stronger. */
function paint(name, value, low, high) {
  if (name === "versions") return `${SERIES[((value % SERIES.length) + SERIES.length) % SERIES.length]}66`;
  if (name === "kept" || name === "trained") return value ? "#0b7a7555" : "#66727f88";
  if (DIVERGING.has(name) || AROUND_ONE.has(name)) {
    const middle = AROUND_ONE.has(name) ? 1 : 0, most = Math.max(Math.abs(low - middle), Math.abs(high - middle)) || 1;
    const share = (value - middle) / most;
    return share >= 0 ? `rgba(11, 122, 117, ${0.6 * share})` : `rgba(209, 73, 91, ${-0.6 * share})`;
  }
  return `rgba(48, 99, 142, ${high > low ? 0.08 + 0.52 * ((value - low) / (high - low)) : 0.3})`;
}

/** A table of (name, value); hovering a rounded number gives all of it. */
function numberTable(rows) {
  const table = make("table");
  for (const [name, value] of rows) {
    const cell = make("td", { className: isNumber(value) ? "number" : "text", textContent: isNumber(value) ? short(value) : typeof value === "object" && value !== null ? JSON.stringify(value) : String(value ?? "") });
    if (isNumber(value)) { cell.title = String(value); cell.dataset.value = String(value); }
    table.append(make("tr", {}, make("th", { textContent: name }), cell));
  }
  return table;
}
