"use strict";
// Charts on canvases, of three kinds: lines, stacked bars, lanes. All zoom (drag, wheel with Ctrl, + and -), go back
// (double click, 0) and say what is under the pointer or the cursor (arrow keys).

const SERIES = ["#0b7a75", "#d1495b", "#edae49", "#30638e", "#7b6d8d", "#8cb369", "#c97b63", "#5c6b73", "#b5a642"];
const LEFT = 56, RIGHT = 10, TOP = 6, BOTTOM = 22, LANE = 26;

/** A DOM element; text is never read as HTML. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isNumber = (value) => typeof value === "number";

/** A number as people read it: five digits. */
function short(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "" : String(value);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5)));
}

/** Round steps between low and high, about `number` of them. */
function ticks(low, high, number) {
  const rough = (high - low) / number || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

/** spec: title, kind (lines | stack | lanes), series of {label, color, dash, xs, ys} or bars of {lane, label, color,
 *  start, stop} with the names of lanes; log: of the y axis; unit: of x. */
class Chart {
  constructor(host, spec) {
    this.spec = spec;
    this.canvas = make("canvas", { tabIndex: 0, role: "img" });
    this.canvas.setAttribute("aria-label", spec.title);
    this.tip = make("div", { className: "tip", hidden: true });
    const legend = make("div", { className: "legend faint" });
    this.swatches = [];
    for (const { label, color, dash } of spec.legend || spec.series) {
      const swatch = make("span", { className: dash ? "swatch dashed" : "swatch" });
      this.swatches.push([swatch, color]);
      legend.append(make("span", {}, swatch, label));
    }
    host.append(make("h3", { textContent: spec.title }), this.canvas, legend, this.tip);
    const xs = spec.kind === "lanes" ? spec.bars.flatMap((bar) => [bar.start, bar.stop]) : spec.series.flatMap((one) => one.xs);
    const pad = spec.kind === "stack" ? 0.5 : 0;
    let low = Infinity, high = -Infinity;
    for (const x of xs) { low = Math.min(low, x); high = Math.max(high, x); }
    this.whole = [low - pad, high > low ? high + pad : low + 1];
    this.range = [...this.whole];
    this.cursor = null;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  get height() { return this.spec.kind === "lanes" ? TOP + BOTTOM + LANE * this.spec.lanes.length : this.spec.tall ? 260 : 190; }
  get left() { return this.spec.kind === "lanes" ? Math.min(110, this.canvas.clientWidth / 4) : LEFT; }
  x(value) { return this.left + ((value - this.range[0]) / (this.range[1] - this.range[0])) * (this.canvas.clientWidth - this.left - RIGHT); }
  back(pixel) { return this.range[0] + ((pixel - this.left) / (this.canvas.clientWidth - this.left - RIGHT)) * (this.range[1] - this.range[0]); }

  listen() {
    const canvas = this.canvas, place = (event) => this.back(event.clientX - canvas.getBoundingClientRect().left);
    let from = null;
    canvas.addEventListener("pointerdown", (event) => { from = place(event); });
    canvas.addEventListener("pointermove", (event) => {
      const y = event.clientY - canvas.getBoundingClientRect().top;
      this.say(place(event), y, from);
    });
    canvas.addEventListener("pointerup", (event) => {
      const to = place(event);
      if (from !== null && Math.abs(this.x(to) - this.x(from)) > 6) this.zoom(Math.min(from, to), Math.max(from, to));
      from = null;
    });
    canvas.addEventListener("pointerleave", () => { from = null; this.hush(); });
    canvas.addEventListener("blur", () => this.hush());
    canvas.addEventListener("dblclick", () => this.zoom(...this.whole));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.scale(event.deltaY > 0 ? 1.25 : 0.8, place(event));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const middle = this.cursor ?? (this.range[0] + this.range[1]) / 2;
      const step = this.spec.kind === "lanes" ? (this.range[1] - this.range[0]) / 50 : 1;
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const next = middle + (event.key === "ArrowLeft" ? -step : step);
        this.say(Math.min(this.range[1], Math.max(this.range[0], next)), this.height / 2, null);
      } else if (event.key === "+") this.scale(0.6, middle);
      else if (event.key === "-") this.scale(1 / 0.6, middle);
      else if (event.key === "0") this.zoom(...this.whole);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  zoom(low, high) {
    if (!(high > low)) return;
    this.range = [Math.max(low, this.whole[0]), Math.min(high, this.whole[1])];
    this.canvas.dataset.range = this.range.join(" ");
    this.draw();
  }

  scale(factor, around) { this.zoom(around + (this.range[0] - around) * factor, around + (this.range[1] - around) * factor); }

  hush() {
    this.tip.hidden = true;
    this.cursor = null;
    this.draw();
  }

  say(x, y, from) {
    this.cursor = x;
    const lines = this.spec.kind === "lanes" ? this.barsAt(x, y) : this.valuesAt(x);
    this.tip.hidden = !lines.length;
    this.tip.textContent = lines.join("\n");
    const left = this.canvas.offsetLeft + this.x(this.cursor) + 12;
    this.tip.style.left = `${Math.max(0, Math.min(left, this.canvas.clientWidth - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${this.canvas.offsetTop + 12}px`;
    this.draw(from);
  }

  valuesAt(x) {
    const all = this.spec.series.flatMap((one) => one.xs);
    const nearest = all.reduce((best, at) => (Math.abs(at - x) < Math.abs(best - x) ? at : best), Infinity);
    if (!Number.isFinite(nearest)) return [];
    this.cursor = nearest;
    const found = this.spec.series.map((one) => [one.label, one.ys[one.xs.indexOf(nearest)]]).filter(([, value]) => isNumber(value));
    return [`step ${nearest}`, ...found.map(([label, value]) => `${label}: ${short(value)}`)];
  }

  barsAt(x, y) {
    const lane = Math.floor((y - TOP) / LANE);
    const bars = this.spec.bars.filter((bar) => bar.lane === lane && bar.start <= x && x <= bar.stop);
    return bars.map((bar) => `${bar.label}: ${short(bar.stop - bar.start)} s\nfrom ${short(bar.start)} to ${short(bar.stop)} s`);
  }

  draw(from = null) {
    const width = this.canvas.parentElement.clientWidth - 16, height = this.height, ratio = window.devicePixelRatio || 1;
    if (width <= 0) return;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.paper = style("--card");
    for (const [swatch, color] of this.swatches) swatch.style.background = seenOn(color, this.paper);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    this.axes(pen, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, width - this.left - RIGHT, height);
    pen.clip();
    this[this.spec.kind](pen, width, height);
    pen.fillStyle = style("--faint");
    if (this.cursor !== null) pen.fillRect(this.x(this.cursor), TOP, 1, height - TOP - BOTTOM);
    if (from !== null && this.cursor !== null) {
      pen.globalAlpha = 0.2;
      pen.fillRect(this.x(from), TOP, this.x(this.cursor) - this.x(from), height - TOP - BOTTOM);
    }
    pen.restore();
  }

  /** Low and high of what is in sight. */
  bounds() {
    let low = Infinity, high = -Infinity;
    const see = (value) => { low = Math.min(low, value); high = Math.max(high, value); };
    const inside = (x) => x >= this.range[0] && x <= this.range[1];
    if (this.spec.kind === "stack") {
      const sums = new Map();
      for (const one of this.spec.series) one.xs.forEach((x, at) => { if (inside(x) && isNumber(one.ys[at])) sums.set(x, (sums.get(x) || 0) + one.ys[at]); });
      sums.forEach(see);
      see(0);
    } else {
      for (const one of this.spec.series) one.xs.forEach((x, at) => { const y = one.ys[at]; if (inside(x) && isNumber(y) && (!this.spec.log || y > 0)) see(y); });
    }
    if (!(high >= low)) return this.spec.log ? [1, 10] : [0, 1];
    if (this.spec.log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return this.spec.kind === "stack" ? [0, high + pad] : [low - pad, high + pad];
  }

  axes(pen, width, height) {
    pen.fillStyle = style("--faint");
    pen.strokeStyle = style("--line");
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    const whole = this.spec.kind !== "lanes";
    for (const tick of ticks(...this.range, Math.max(2, width / 90)).filter((value) => !whole || Number.isInteger(value)))
      pen.fillText(whole ? tick : `${tick} s`, this.x(tick), height - BOTTOM / 2);
    pen.textAlign = "right";
    if (!whole) {
      this.spec.lanes.forEach((name, at) => pen.fillText(name, this.left - 6, TOP + LANE * (at + 0.5), this.left - 8));
      return;
    }
    const [low, high] = this.bounds();
    const scaled = this.spec.log ? Math.log10 : (value) => value;
    this.y = (value) => height - BOTTOM - ((scaled(value) - scaled(low)) / (scaled(high) - scaled(low))) * (height - TOP - BOTTOM);
    const marks = this.spec.log
      ? ticks(Math.log10(low), Math.log10(high), 4).filter(Number.isInteger).map((power) => 10 ** power)
      : ticks(low, high, 4);
    for (const tick of marks) {
      pen.fillText(Math.abs(tick) >= 1e4 || (tick && Math.abs(tick) < 1e-3) ? tick.toExponential(0) : short(tick), LEFT - 6, this.y(tick));
      pen.beginPath();
      pen.moveTo(LEFT, this.y(tick));
      pen.lineTo(width - RIGHT, this.y(tick));
      pen.stroke();
    }
  }

  lines(pen) {
    for (const { xs, ys, color, dash } of this.spec.series) {
      pen.strokeStyle = pen.fillStyle = seenOn(color, this.paper);
      pen.lineWidth = 1.6;
      pen.setLineDash(dash ? [5, 4] : []);
      pen.beginPath();
      let down = false, number = 0;
      xs.forEach((x, at) => {
        const y = ys[at];
        if (y === undefined) return;
        if (!isNumber(y) || (this.spec.log && y <= 0)) { down = false; return; }
        number += 1;
        if (down) pen.lineTo(this.x(x), this.y(y)); else pen.moveTo(this.x(x), this.y(y));
        down = true;
      });
      pen.stroke();
      if (number <= 30) xs.forEach((x, at) => { if (isNumber(ys[at]) && (!this.spec.log || ys[at] > 0)) { pen.beginPath(); pen.arc(this.x(x), this.y(ys[at]), 2.2, 0, 7); pen.fill(); } });
    }
    pen.setLineDash([]);
  }

  stack(pen) {
    const floor = new Map();
    for (const { xs, ys, color } of this.spec.series) {
      pen.fillStyle = seenOn(color, this.paper);
      xs.forEach((x, at) => {
        if (!isNumber(ys[at])) return;
        const low = floor.get(x) || 0, high = low + ys[at];
        pen.fillRect(this.x(x - 0.46), this.y(high), Math.max(1, this.x(x + 0.46) - this.x(x - 0.46)), this.y(low) - this.y(high));
        floor.set(x, high);
      });
    }
  }

  lanes(pen) {
    pen.textAlign = "center";
    for (const { lane, label, color, start, stop } of this.spec.bars) {
      const left = this.x(start), width = Math.max(1, this.x(stop) - left), top = TOP + LANE * lane + 3;
      if (left > this.canvas.clientWidth || left + width < this.left) continue;
      const fill = seenOn(color, this.paper);
      pen.fillStyle = fill;
      pen.fillRect(left, top, width, LANE - 6);
      pen.fillStyle = textOn(fill);
      if (width > pen.measureText(label).width + 6) pen.fillText(label, left + width / 2, top + LANE / 2 - 3);
    }
  }
}

/** Make charts of specifications when they come into sight, in a grid. */
function chartGrid(specs) {
  const grid = make("div", { className: "charts" });
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      seen.unobserve(entry.target);
      entry.target.chart = new Chart(entry.target, entry.target.spec);
    }
  }, { rootMargin: "300px" });
  for (const spec of specs) {
    const host = make("div", { className: spec.tall || spec.kind === "lanes" ? "chart wide" : "chart" });
    host.style.minHeight = "200px";
    host.spec = spec;
    grid.append(host);
    seen.observe(host);
  }
  return grid;
}
