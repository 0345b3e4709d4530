// What a program of a client library did, as test/compat/python/report.py has it:
// the same report, the same environment.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";

export class Report {
  rows = new Set();
  done = new Set();
  refused = {};
  served = new Set();
  #unserved = new Set((process.env.COMPAT_UNSERVED ?? "").split(",").filter(Boolean));

  constructor(program) {
    this.program = program;
  }

  // surface adds the methods that one of the library's own type declarations has.
  surface(name, file, type) {
    const text = readFileSync(file, "utf8");
    const block = text.match(new RegExp(`^(?:declare class|interface) ${type} \\{\\n([\\s\\S]*?)^\\}`, "m"));
    assert(block, `${file} declares no ${type}`);
    const methods = [...block[1].matchAll(/^ {4}(?:static )?(\w+)\??(?:<\w+>)?\(/gm)].map((m) => m[1]);
    for (const m of methods) if (m !== "constructor") this.rows.add(`${name}.${m}`);
  }

  // chapter runs body. The rows are methods that it calls, or options that it shows.
  async chapter(name, rows, body) {
    console.log(`${this.program}: ${name}`);
    const methods = rows.filter((r) => this.rows.has(r));
    for (const r of rows) this.rows.add(r);
    try {
      await body();
    } catch (e) {
      if (!this.#unserved.has(name)) throw e;
      this.refused[name] = { said: `${e.name}: ${e.message} ${JSON.stringify(e.rawBody ?? "")}`, rows };
      return;
    }
    const leftOut = methods.filter((m) => !this.done.has(m));
    assert.deepEqual(leftOut, [], `the chapter ${name} says it calls these, and did not`);
    for (const r of rows) this.done.add(r);
    this.served.add(name);
  }

  write() {
    const done = [...this.done].filter((r) => this.rows.has(r));
    const all = { rows: [...this.rows].sort(), done: done.sort(), refused: this.refused, served: [...this.served].sort() };
    writeFileSync(process.env.COMPAT_REPORT, JSON.stringify(all));
    console.log(`${this.program}: the end`);
  }
}

// watch returns it under the name its users know it by: calls go through, and
// are remembered once they came back. services are properties that are watched
// too, results the names of what comes back from calls.
export function watch(report, it, name, services, results) {
  const again = (value, as) => watch(report, value, as, services, results);
  return new Proxy(it, {
    get(target, key) {
      const value = Reflect.get(target, key, target);
      const path = `${name}.${String(key)}`;
      if (services.has(path)) return again(value, path);
      if (typeof value !== "function" || typeof key === "symbol") return value;
      return (...args) => {
        const back = value.apply(target, args);
        const came = (result) => {
          report.done.add(path);
          return results[path] ? again(result, results[path]) : result;
        };
        return back instanceof Promise ? back.then(came) : came(back);
      };
    },
  });
}
