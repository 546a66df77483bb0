// Figures as text. What is not known is a dash.

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

const known = (format) => (value) => (value === null || value === undefined ? UNKNOWN : format(value));

export const count = known((value) => whole.format(value));

export const compact = known((value) => (value < 10000 ? whole.format(value) : short.format(value)));

/** A share from 0 to 1. */
export const percent = known((value) => {
  const shown = 100 * value;
  return `${shown > 0 && shown < 10 || shown > 99 && shown < 100 ? tenths.format(shown) : whole.format(shown)} %`;
});

/** A number for each second. */
export const rate = known((value) => (value < 10 ? tenths : whole).format(value));

/** A short time: milliseconds, or seconds. */
export const seconds = known((value) => {
  if (value < 1) return `${whole.format(value * 1000)} ms`;
  return `${(value < 10 ? tenths : whole).format(value)} s`;
});

/** A long time in its largest units. */
export const span = known((value) => {
  const total = Math.max(Math.round(value), 0);
  const [days, hours] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24];
  const [minutes, rest] = [Math.floor(total / 60) % 60, total % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes >= 10) return `${minutes} min`;
  return minutes ? `${minutes} min ${rest} s` : `${rest} s`;
});

/** The same since then, in its largest unit. */
export const ago = known((value) => {
  if (value < 1.5) return "now";
  if (value < 60) return `${Math.round(value)} s ago`;
  if (value < 3600) return `${Math.floor(value / 60)} min ago`;
  return `${Math.floor(value / 3600)} h ago`;
});

const hours = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const clocks = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

/** The time of day, from seconds since 1970. */
export const time = (atS) => hours.format(atS * 1000);
export const clock = (atS) => clocks.format(atS * 1000);

/** A session's name and its agent's: of a hash or a UUID its first digits, of another the beginning. */
export const shortName = (name) => name.split("/", 2).map((part) => {
  if (/^[0-9a-f-]{16,}$/i.test(part)) return part.slice(0, 8);
  return part.length > 12 ? `${part.slice(0, 11)}…` : part;
}).join("/");
