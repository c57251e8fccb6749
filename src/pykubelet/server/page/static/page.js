// Live updates, charts, keyboard and theme of pykubelet's page. Without this file the page is complete, but
// static. HTML comes from the server, escaped there; nothing of it is evaluated.

const content = document.getElementById("content");
const live = document.getElementById("live");
const root = document.documentElement;

// Charts

const charts = [];
// Series of the charts on this page that have no value yet.
const unmeasured = new Set();
const MOST_POINTS = 1200;
const MOST_PARTS = 3;
const SHORTEST = 30;
const POWERS = Array.from({ length: 50 }, (_, exponent) => 2 ** exponent);
// A scale has at least this height, so that its labels differ.
const lowest = { share: 0.02, cores: 0.004, bytes: 4, rate: 4, seconds: 0.0004 };
// The charts show the time zone of the node, as the rest of the page.
const zone = Number(document.body.dataset.zone) || 0;
const units = {
  cores: (v) => (v < 1 ? `${Number((v * 1000).toFixed(v < 0.01 ? 1 : 0))}m` : v.toFixed(2)),
  bytes: (v) => {
    const names = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (v >= 1024 && at < names.length - 1) { v /= 1024; at += 1; }
    return `${v >= 100 || at === 0 ? Math.round(v) : v.toFixed(1)} ${names[at]}`;
  },
  rate: (v) => `${units.bytes(v)}/s`,
  share: (v) => `${(v * 100).toFixed(v < 0.1 ? 1 : 0)} %`,
  seconds: (v) => (v < 1 ? `${(v * 1000).toFixed(v < 0.01 ? 1 : 0)} ms` : `${v.toFixed(2)} s`),
};
const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

const titles = { cpu: "CPU", lag: "longest", cri: "mean", api: "mean", rss: "resident", throttled: "throttled" };
function label(name) {
  const [series, container] = name.split("@");
  if (container) return container;
  return titles[series] || series.replace("pressure-", "");
}

function makeChart(figure, data) {
  const peak = (name) => Math.max(0, ...data.series[name].filter((value) => value != null));
  const wanted = figure.dataset.series.split(" ");
  for (const name of wanted) if (!data.series[name]) unmeasured.add(name);
  const known = wanted.filter((name) => data.series[name]);
  // That of the whole pod, and the largest ones of its containers.
  const [wholes, parts] = [known.filter((name) => !name.includes("@")), known.filter((name) => name.includes("@"))];
  const names = [...wholes, ...parts.sort((a, b) => peak(b) - peak(a)).slice(0, MOST_PARTS)];
  const plot = figure.querySelector(".plot");
  plot.replaceChildren();
  if (!names.length) {
    const none = document.createElement("p");
    none.className = "none";
    none.textContent = figure.dataset.none || "No measurement yet";
    plot.append(none);
    return;
  }
  // Times before the first measurement are left out, but five minutes are shown at least.
  // The charts of a pod begin with its time axis.
  const first = data.times.findIndex((_, index) => names.some((name) => data.series[name][index] != null));
  const start = Number(figure.parentElement.dataset.from);
  const from = start
    ? Math.max(data.times.findIndex((time) => time >= start), 0)
    : Math.max(Math.min(first, data.times.length - SHORTEST), 0);
  const format = units[figure.dataset.unit] || String;
  const isBytes = ["bytes", "rate"].includes(figure.dataset.unit);
  const bounds = [["--bad", Number(figure.dataset.limit) || 0], ["--soft", Number(figure.dataset.request) || 0]];
  const values = names.map((name) => data.series[name].slice(from));
  const legend = document.createElement("span");
  legend.className = "legend";
  const current = names.map((name, index) => {
    const item = document.createElement("span");
    item.className = `swatch s${index + 1}`;
    item.textContent = label(name);
    const value = document.createElement("b");
    item.append(value);
    legend.append(item);
    return value;
  });
  if (known.length > names.length) {
    const more = document.createElement("span");
    more.textContent = `and ${known.length - names.length} more`;
    legend.append(more);
  }
  const caption = figure.querySelector("figcaption");
  caption.querySelector(".legend")?.remove();
  caption.append(legend);
  const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  let chart = null;
  const show = (index) => {
    if (!chart) return;
    const at = index ?? chart.data[0].length - 1;
    names.forEach((_, number) => {
      let value = chart.data[number + 1][at];
      // The newest slot may not have a value yet.
      if (value == null && index == null) value = chart.data[number + 1].findLast((each) => each != null);
      current[number].textContent = value == null ? "–" : format(value);
    });
  };
  chart = new uPlot({
    width: plot.clientWidth, height: plot.clientHeight || 136,
    cursor: { y: false, points: { size: 6 } }, legend: { show: false },
    padding: [8, 18, 0, 0],
    scales: { y: { range: (_, low, high) => {
      const near = bounds.map(([, bound]) => (bound <= 2.5 * high ? bound : 0));
      return [0, Math.max(high, lowest[figure.dataset.unit] || 1e-9, ...near) * 1.08];
    } } },
    axes: [
      { ...axis, size: 22, space: 46, values: (_, splits) => splits.map((s) => new Date((s + zone) * 1000).toISOString().slice(11, 16)) },
      { ...axis, size: 62, space: 32, values: (_, splits) => splits.map(format), ...(isBytes ? { incrs: POWERS } : {}) },
    ],
    series: [{}, ...names.map((name, index) => ({
      label: label(name), stroke: () => colour(`--c${index + 1}`), width: 1.5, points: { show: false }, spanGaps: false,
      fill: names.length === 1 ? () => `${colour("--c1")}1f` : undefined,
    }))],
    hooks: {
      draw: [(u) => {
        const { ctx } = u;
        for (const [name, bound] of bounds) {
          const y = u.valToPos(bound, "y", true);
          if (!bound || y < u.bbox.top) continue;
          ctx.save();
          ctx.strokeStyle = colour(name);
          ctx.setLineDash(name === "--bad" ? [5, 4] : [1, 3]);
          ctx.beginPath();
          ctx.moveTo(u.bbox.left, y);
          ctx.lineTo(u.bbox.left + u.bbox.width, y);
          ctx.stroke();
          ctx.restore();
        }
      }],
      setCursor: [(u) => show(u.cursor.idx)],
    },
  }, [data.times.slice(from), ...values], plot);
  show(null);
  charts.push({ figure, plot, chart, names, show });
}

async function drawCharts() {
  const figures = [...document.querySelectorAll("figure.chart")];
  if (!figures.length || !window.uPlot) return;
  const path = location.pathname === "/" ? "/node" : location.pathname;
  const response = await fetch(`/data${path}`);
  if (!response.ok) return;
  const data = await response.json();
  charts.splice(0).forEach(({ chart }) => chart.destroy());
  unmeasured.clear();
  figures.forEach((figure) => makeChart(figure, data));
}

function addSample(sample) {
  if (!sample.values) return;
  // The first value of a series: its chart is drawn, or drawn again with it.
  if (Object.keys(sample.values).some((name) => unmeasured.has(name))) {
    drawCharts();
    return;
  }
  for (const { chart, names, show } of charts) {
    const times = chart.data[0];
    if (sample.time <= times[times.length - 1]) continue;
    const cut = times.length >= MOST_POINTS || times[0] < sample.time - 1800 ? 1 : 0;
    chart.setData([
      [...times.slice(cut), sample.time],
      ...names.map((name, index) => [...chart.data[index + 1].slice(cut), sample.values[name] ?? null]),
    ]);
    if (chart.cursor.idx == null) show(null);
  }
}

new ResizeObserver(() => {
  for (const { plot, chart } of charts) {
    if (plot.clientWidth && plot.clientWidth !== chart.width) chart.setSize({ width: plot.clientWidth, height: chart.height });
  }
}).observe(content);

// Live updates

function replace(id, html) {
  const old = document.getElementById(id);
  if (html === null) {
    old?.remove();
    return;
  }
  const parsed = new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
  if (!parsed) return;
  if (!old) {
    // A section that is new: after the last one of the same kind.
    content.append(parsed);
    return;
  }
  // Keep what the reader does: scrolling, an opened element, the focus.
  const scrolled = [...old.querySelectorAll(".log, .frame")].map((each) => [each.scrollTop, each.scrollLeft, each.scrollHeight - each.clientHeight - each.scrollTop < 8]);
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const key = focused && (focused.getAttribute("href") || focused.getAttribute("aria-label"));
  old.replaceWith(parsed);
  [...parsed.querySelectorAll(".log, .frame")].forEach((each, index) => {
    if (!scrolled[index]) return;
    const [top, left, atEnd] = scrolled[index];
    each.scrollLeft = left;
    each.scrollTop = atEnd && each.classList.contains("log") ? each.scrollHeight : top;
  });
  if (key) {
    const again = [...parsed.querySelectorAll("a, [tabindex]")].find((each) => (each.getAttribute("href") || each.getAttribute("aria-label")) === key);
    again?.focus({ preventScroll: true });
  }
}

// Sections that have changed while text was selected: the server sends each change once.
const pending = new Map();
function applyPending() {
  if (!pending.size || !getSelection().isCollapsed) return;
  for (const [id, html] of pending) replace(id, html);
  pending.clear();
  filterRows();
}
document.addEventListener("selectionchange", applyPending);

function handleUpdate(message) {
  const removed = message.isWhole
    ? [...content.querySelectorAll("[data-live]")].map((each) => each.id).filter((id) => !(id in message.sections))
    : message.removed;
  for (const id of removed) pending.set(id, null);
  for (const [id, html] of Object.entries(message.sections)) pending.set(id, html);
  applyPending();
  addSample(message.sample);
}

// The pod is not on the node any more: what is shown is its last state.
function setGone(isGone) {
  content.classList.toggle("gone", isGone);
  const banner = document.getElementById("gone");
  if (!isGone) banner?.remove();
  if (!isGone || banner) return;
  const added = document.createElement("p");
  added.id = "gone";
  added.className = "banner";
  added.setAttribute("role", "alert");
  const link = document.createElement("a");
  link.href = "/pods";
  link.textContent = "All pods";
  added.append("This pod is gone; below is its last state. ", link);
  content.before(added);
}

function setLive(state, text) {
  live.className = `live ${state}`;
  if (live.textContent !== text) live.textContent = text;
}

let source;
let retry = 1000;
let connected = false;
function connect() {
  const query = document.body.dataset.events;
  if (!query) return;
  source = new EventSource(`/events?${query}`);
  source.addEventListener("open", () => {
    retry = 1000;
    if (connected) drawCharts();
    connected = true;
    setLive("on", "live");
  });
  source.addEventListener("update", (event) => {
    handleUpdate(JSON.parse(event.data));
    setGone(false);
    setLive("on", "live");
  });
  source.addEventListener("gone", () => {
    setGone(true);
    setLive("lost", "the pod is gone");
  });
  source.addEventListener("error", () => {
    setLive("lost", "not connected");
    // The browser reconnects by itself after a lost connection, but not after an error status.
    if (source.readyState === EventSource.CLOSED) {
      setTimeout(connect, retry);
      retry = Math.min(retry * 2, 30000);
    }
  });
}

// Filter of the list of pods

const filter = document.getElementById("filter");
function filterRows() {
  if (!filter) return;
  const text = filter.value.trim().toLowerCase();
  for (const row of document.querySelectorAll("tr[data-text]")) row.hidden = !row.dataset.text.includes(text);
}
filter?.addEventListener("input", filterRows);
for (const select of document.querySelectorAll(".filters select")) select.addEventListener("change", () => select.form.submit());
document.querySelector(".filters button")?.setAttribute("hidden", "");

// Theme

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  document.cookie = `theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
  for (const { chart } of charts) chart.redraw(false, true);
});

// Keyboard

let prefix = -1;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const inField = event.target.closest("input, select, textarea");
  if (inField) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const link = document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`);
  if (link) link.click();
  else if (event.key === "/" && filter) { event.preventDefault(); filter.focus(); }
  else if (event.key === "t") theme.click();
  else if (event.key === "j" || event.key === "k") {
    const pods = [...content.querySelectorAll("a.pod")].filter((each) => !each.closest("[hidden]"));
    if (!pods.length) return;
    const now = pods.indexOf(document.activeElement);
    prefix = now >= 0 ? now : prefix;
    prefix = Math.min(Math.max(prefix + (event.key === "j" ? 1 : -1), 0), pods.length - 1);
    pods[prefix].focus();
  }
});

filterRows();
for (const log of document.querySelectorAll(".log")) log.scrollTop = log.scrollHeight;
drawCharts();
connect();
