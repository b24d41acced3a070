// What the server sends, and how numbers and times are written.

// The server sends something each second. A connection that has been silent for this long is dead.
const silence = 15000;
const firstDelay = 1000, longestDelay = 30000;

/**
 * follow reads the event stream and begins again whenever it ends. on.event is called with each
 * event, and on.state with "connecting", "live", or "lost" and the reason. It returns a function
 * that ends the current connection and, if its argument is true, begins a new one.
 */
export function follow(on) {
  let abort = new AbortController(), timer = 0, delay = firstDelay;
  const again = () => {
    timer = setTimeout(run, delay);
    delay = Math.min(2 * delay, longestDelay);
  };
  async function run() {
    const mine = abort = new AbortController();
    let watchdog = 0;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => mine.abort("the server is silent"), silence);
    };
    let reason = "the connection has ended";
    try {
      heard();
      const response = await fetch("events", { signal: mine.signal, cache: "no-store" });
      if (!response.ok) throw (await response.text()).trim() || `status ${response.status}`;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        heard();
        const messages = (text + value).split("\n\n");
        text = messages.pop();
        for (const m of messages) {
          if (m.startsWith(":")) continue; // a comment, which keeps the connection alive
          const [event, data] = m.split("\n", 2);
          on.event(event.slice("event: ".length), JSON.parse(data.slice("data: ".length)));
        }
        delay = firstDelay;
        on.state("live");
      }
    } catch (error) {
      reason = typeof error === "string" ? error : error.message;
    }
    clearTimeout(watchdog);
    if (mine.signal.reason === "stopped") return;
    on.state("lost", reason);
    again();
  }
  on.state("connecting");
  run();
  return (anew) => {
    clearTimeout(timer);
    abort.abort("stopped");
    if (anew) {
      delay = firstDelay;
      run();
    }
  };
}

/** ask returns the answer to a question, or throws the reason why there is none. */
export async function ask(path, parameters) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { cache: "no-store" });
  if (!response.ok) throw (await response.text()).trim() || `status ${response.status}`;
  return response.json();
}

const numbers = new Intl.NumberFormat("en");

export const count = (n) => numbers.format(n);

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** span writes milliseconds for people. */
export function span(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1000) return `${Number(ms.toPrecision(3))} ms`;
  const s = ms / 1000;
  if (s < 60) return `${Number(s.toPrecision(3))} s`;
  const m = Math.floor(s / 60), h = Math.floor(m / 60), d = Math.floor(h / 24);
  if (m < 10) return `${m} min ${Math.floor(s % 60)} s`;
  if (m < 60) return `${m} min`;
  return h < 24 ? `${h} h ${m % 60} min` : `${d} d ${h % 24} h`;
}

/** element returns a new element with a class and children, which are elements or texts. */
export function element(name, className, ...children) {
  const e = document.createElement(name);
  if (className) e.className = className;
  e.append(...children);
  return e;
}
