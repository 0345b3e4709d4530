// The driver of javascript and typescript: it reads cells from the agent, one
// JSON object a line, has V8 evaluate them as its own REPL mode does, and
// answers with frames. A frame is a line of the context's secret and a JSON
// object, with an empty line before it: see python.py.
'use strict';
(() => {
  const fs = require('fs');
  const inspector = require('inspector');
  const module_ = require('module');
  const net = require('net');
  const path = require('path');
  const util = require('util');
  const vm = require('vm');

  const CHANNEL = 3;
  const MAX_TEXT = 1 << 20; // characters
  const MAX_BUNDLE = 3 << 20; // bytes of all formats of one result: some SDKs take lines of 4 MiB
  const typescript = process.argv.includes('typescript');
  let secret;

  // writeAll writes, and waits while the agent is slower.
  function writeAll(fd, data) {
    for (let rest = data; rest.length > 0; ) {
      try {
        rest = rest.subarray(fs.writeSync(fd, rest));
      } catch (e) {
        if (e.code !== 'EAGAIN') throw e;
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1);
      }
    }
  }

  // An interrupt may end a write of node's own streams half way, and such a stream writes nothing any more. These
  // writes keep no state, and what they wrote is in its pipe.
  for (const [stream, fd] of [[process.stdout, 1], [process.stderr, 2]]) {
    stream.write = (data, encoding, callback) => {
      const done = typeof encoding === 'function' ? encoding : callback;
      writeAll(fd, typeof data === 'string' ? Buffer.from(data, typeof encoding === 'string' ? encoding : 'utf8') : Buffer.from(data));
      if (typeof done === 'function') process.nextTick(done);
      return true;
    };
  }

  // say sends a frame.
  function say(frame) {
    writeAll(CHANNEL, Buffer.from('\n' + secret + JSON.stringify(frame) + '\n'));
  }

  // Results.

  function asText(mime, data) {
    if (data instanceof Uint8Array) return Buffer.from(data).toString('base64');
    return typeof data === 'string' && !mime.endsWith('json') ? data : typeof data === 'string' ? data : JSON.stringify(data);
  }

  function describe(value) {
    let text = util.inspect(value);
    if (text.length > MAX_TEXT) text = `${text.slice(0, MAX_TEXT)}… (${text.length} characters in all)`;
    const bundle = { text };
    try {
      const own = value?.[Symbol.for('Jupyter.display')];
      if (typeof own === 'function') {
        for (const [mime, data] of Object.entries(own.call(value) ?? {})) bundle[mime] = asText(mime, data);
      } else if (Array.isArray(value) || (value && typeof value === 'object' && Object.getPrototypeOf(value) === Object.prototype)) {
        bundle['application/json'] = JSON.stringify(value);
      }
    } catch {
      // a cycle, a bigint, a getter that throws: the text says it
    }
    return fitting(bundle);
  }

  function fitting(bundle) {
    const sizes = Object.entries(bundle).map(([mime, data]) => [mime, Buffer.byteLength(data ?? '')]).sort((a, b) => b[1] - a[1]);
    let sum = sizes.reduce((n, [, size]) => n + size, 0);
    for (const [mime, size] of sizes) {
      if (sum <= MAX_BUNDLE) break;
      if (mime === 'text') continue;
      process.stderr.write(`${mime} is left out: it has ${size} bytes; a result may have at most ${MAX_BUNDLE}\n`);
      delete bundle[mime];
      sum -= size;
    }
    return bundle;
  }

  function display(...values) {
    for (const value of values) say({ type: 'result', results: describe(value) });
  }

  // Errors.

  function failure(error, position) {
    if (!util.types.isNativeError(error)) {
      const text = util.inspect(error);
      return { ename: 'Uncaught', evalue: text, traceback: ['Uncaught ' + text] };
    }
    const lines = String(error.stack ?? error).split('\n');
    let last = lines.findLastIndex((line) => line.includes('<cell '));
    if (last < 0) last = lines.findIndex((line) => line.startsWith('    at ')) - 1;
    const traceback = last < 0 ? lines : lines.slice(0, last + 1);
    if (position) traceback.push(position);
    return { ename: String(error.name), evalue: String(error.message).slice(0, MAX_TEXT), traceback: traceback.slice(0, 1000) };
  }

  // Source.

  // An import declaration is no statement of a script. So each becomes what it means at the top level.
  const IMPORT = /^([ \t]*)import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)\s*|\{([^}]*)\}\s*)?(?:from\s*)?(['"])([^'"\n]+)\5(?:\s*(?:with|assert)\s*\{[^}]*\})?[ \t]*;?/gm;

  function withoutImports(code) {
    return code.replace(IMPORT, (all, indent, byDefault, star, named, _quote, from) => {
      const source = `await __import(${JSON.stringify(from)})`;
      if (star && !byDefault) return `${indent}const ${star} = ${source};`;
      const names = (named ?? '').split(',').map((n) => n.trim()).filter((n) => n && !n.startsWith('type ')).map((n) => n.replace(/\s+as\s+/, ': '));
      if (byDefault) names.unshift(`default: ${byDefault}`);
      const rest = star ? ` const ${star} = ${source};` : '';
      return names.length ? `${indent}const { ${names.join(', ')} } = ${source};${rest}` : `${indent}${source};`;
    }).replace(/^export\s*\{\s*\};?[ \t]*$/gm, '').replace(/^export\s+(?=const|let|var|function|class|async)/gm, '');
  }

  // V8 gives code of its REPL mode no way to load modules, so import() becomes a call of ours, outside of
  // comments, strings and templates.
  const DYNAMIC = /(\/\/[^\n]*|\/\*[\s\S]*?\*\/|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|`(?:\\[\s\S]|[^`\\])*`)|(?<![\w$.])import(?=\s*\()/g;
  Object.defineProperty(globalThis, '__import', { value: (name) => import(name) });

  function withOurImport(code) {
    return code.replace(DYNAMIC, (all, other) => other ?? '__import');
  }

  let erase;
  function eraser() {
    const places = [process.cwd(), ...(process.env.NODE_PATH ?? '').split(':'), '/usr/share/nodejs', '/usr/lib/node_modules', '/usr/local/lib/node_modules'];
    for (const place of places.filter(path.isAbsolute)) {
      for (const name of ['typescript', path.join(place, 'typescript')]) {
        try {
          const ts = module_.createRequire(path.join(place, 'x.js'))(name);
          const keep = parseInt(ts.version, 10) >= 5 ? { verbatimModuleSyntax: true } : { preserveValueImports: true };
          const compilerOptions = { target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext, isolatedModules: true, ...keep };
          return (code) => {
            const { outputText, diagnostics } = ts.transpileModule(code, { compilerOptions, reportDiagnostics: true });
            const wrong = (diagnostics ?? []).find((d) => d.category === ts.DiagnosticCategory.Error && d.code < 2000);
            if (wrong) {
              const at = wrong.file.getLineAndCharacterOfPosition(wrong.start);
              throw new SyntaxError(`${ts.flattenDiagnosticMessageText(wrong.messageText, '\n')} (line ${at.line + 1}, column ${at.character + 1})`);
            }
            return outputText;
          };
        } catch (e) {
          if (e.code !== 'MODULE_NOT_FOUND') throw e;
        }
      }
    }
    if (module_.stripTypeScriptTypes) return (code) => module_.stripTypeScriptTypes(code, { mode: 'transform' });
    throw new Error('this image cannot erase types: it needs the package typescript, or a node of version 22.13 or later');
  }

  // Running cells.

  const session = new inspector.Session();
  session.connect();
  const hidden = Symbol('sandboxd');
  const box = {};
  Object.defineProperty(globalThis, hidden, { value: box });
  const inside = new vm.Script(`globalThis[Object.getOwnPropertySymbols(globalThis).find((s) => s.description === 'sandboxd')].evaluate()`);

  function post(method, params) {
    return new Promise((resolve, reject) => session.post(method, params, (e, r) => (e ? reject(new Error(e.message)) : resolve(r))));
  }

  // valueOf takes what a remote object stands for; the session is in the same heap.
  async function valueOf(remote) {
    if (!remote.objectId) {
      if (remote.unserializableValue === undefined) return remote.value === undefined && remote.subtype === 'null' ? null : remote.value;
      return vm.runInThisContext(remote.unserializableValue); // NaN, -0, Infinity, 1n
    }
    await post('Runtime.callFunctionOn', {
      functionDeclaration: `function (v) { globalThis[Object.getOwnPropertySymbols(globalThis).find((s) => s.description === 'sandboxd')].value = v; }`,
      objectId: remote.objectId, arguments: [{ objectId: remote.objectId }],
    });
    const value = box.value;
    box.value = undefined;
    return value;
  }

  async function evaluate(code, name) {
    let reply;
    box.evaluate = () => {
      reply = post('Runtime.evaluate', { expression: `${code}\n//# sourceURL=${name}`, replMode: true, awaitPromise: true, objectGroup: 'cell', includeCommandLineAPI: false });
      reply.catch(() => {});
    };
    inside.runInThisContext({ breakOnSigint: true }); // an interrupt ends a loop that never awaits
    return reply;
  }

  let current; // the call that runs

  async function run(code, name) {
    if (typescript) {
      erase ??= eraser();
      code = erase(code);
    }
    code = withOurImport(code);
    let r = await evaluate(code, name);
    if (r.exceptionDetails?.exception?.className === 'SyntaxError') {
      const changed = withoutImports(code);
      if (changed !== code) r = await evaluate(changed, name);
    }
    if (r.exceptionDetails) {
      const d = r.exceptionDetails;
      const error = await valueOf(d.exception ?? { value: d.text });
      const syntax = d.exception?.className === 'SyntaxError' && !String(error.stack).includes('<cell ');
      const told = failure(error, syntax ? `    at ${name}:${d.lineNumber + 1}:${d.columnNumber + 1}` : undefined);
      return { error: told, signal: Object(error).signal };
    }
    return { value: await valueOf(r.result) };
  }

  // Interrupts.
  //
  // A SIGINT ends what spins: while a script of breakOnSigint runs, a thread of node's waits for one. Before and after each
  // such script node changes what the signal does, and in between that is death. It changes nothing while the thread
  // waits for another reason, as in its REPL: so it waits for good. What awaits is ended by a message.

  // Once node has taken a signal, listeners that come and go change nothing: they are told with the message. A signal
  // that nobody ever listened to would end node's inspector when the process sends it to itself.
  const taken = () => {};
  process.on('SIGINT', taken);
  for (const listen of process.rawListeners('removeListener')) {
    process.off('removeListener', listen);
    process.on('removeListener', (event, ...rest) => event !== 'SIGINT' && listen.call(process, event, ...rest));
  }
  process.off('SIGINT', taken);
  const watchdog = process.binding('contextify');
  const tasks = () => fs.readdirSync('/proc/self/task');
  const earlier = tasks();
  watchdog.startSigintWatchdog();
  const waiter = tasks().filter((id) => !earlier.includes(id));

  // asleep reports whether node's thread waits for a SIGINT: it has met all that have come, then (proc_pid_stat(5)).
  function asleep() {
    return waiter.every((id) => /\) S/.test(fs.readFileSync(`/proc/self/task/${id}/stat`, 'latin1')));
  }

  // settle waits until node's thread has met the SIGINTs that have come, and ours behind them. On a busy machine it may
  // have met the first of them only. gVisor says of a thread that was woken that it sleeps until it runs: hence the time.
  // What is asked meanwhile is answered in its place: two that wait would forget each other's signals.
  let settling;
  async function settle(number) {
    const waits = settling !== undefined;
    settling = number;
    process.kill(process.pid, 'SIGINT');
    if (waits) return;
    let met;
    do {
      met = settling;
      await new Promise((resolve) => setTimeout(resolve, 2));
    } while (met !== settling || !watchdog.watchdogHasPendingSigint() || !asleep());
    watchdog.startSigintWatchdog();
    watchdog.stopSigintWatchdog(); // this forgets them
    settling = undefined;
    say({ type: 'settled', status: met });
  }

  async function cell(request) {
    const name = `<cell ${request.count}>`;
    const call = (current = { count: request.count });
    let end;
    try {
      end = await run(request.code, name);
    } catch (e) {
      end = { error: e.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED' ? interrupted : failure(e) };
    }
    // An interrupt is a SIGINT to the whole process group, and a message behind it. A child may die of the one, and its
    // death end the call, before the other is here. If none comes, the child died of something else.
    if (end.signal === 'SIGINT') await new Promise((resolve) => setTimeout(resolve, 1000));
    finish(call, end);
  }

  const interrupted = { ename: 'KeyboardInterrupt', evalue: 'the code was interrupted', traceback: ['KeyboardInterrupt: the code was interrupted'] };

  function finish(call, end) {
    if (current !== call) return; // it was interrupted, and went on
    current = undefined;
    let error = end.error;
    if (!error && end.value !== undefined) {
      try {
        say({ type: 'result', results: describe(end.value) });
      } catch (e) {
        error = failure(e);
      }
    }
    session.post('Runtime.releaseObjectGroup', { objectGroup: 'cell' });
    say(error ? { type: 'done', error } : { type: 'done' });
  }

  function interrupt(count) {
    if (current?.count !== count) return;
    process.emit('SIGINT', 'SIGINT', 2);
    finish(current, { error: interrupted });
  }

  // Copies.

  // move gives this process, which has run nothing, the environment of another sandbox.
  function move(place) {
    for (const [name, [before, after]] of Object.entries(place.env)) {
      if (process.env[name] !== (before ?? undefined)) process.exit(1); // the next call gets a new context
      if (after === null) delete process.env[name];
      else process.env[name] = after;
    }
  }

  // fresh fills bytes with the kernel's random numbers, which no copy of this process has had.
  function fresh(bytes) {
    const fd = fs.openSync('/dev/urandom', 'r');
    try {
      for (let at = 0; at < bytes.length; ) at += fs.readSync(fd, bytes, at, Math.min(bytes.length - at, 1 << 20), null);
    } finally {
      fs.closeSync(fd);
    }
    return bytes;
  }

  // reseed has code draw other random numbers: this process is a copy of one that goes on. The state of Math.random is
  // V8's and that of crypto is OpenSSL's, and nothing that a script can call changes either. So the functions are
  // replaced: each calls the old one, for its errors, and puts the kernel's numbers in place of the result.
  let reseeded = false;
  const generator = new Uint32Array(4);
  function reseed(seed) {
    fresh(new Uint8Array(generator.buffer));
    for (let i = 0; i < generator.length; i++) generator[i] ^= parseInt(seed.slice(8 * i, 8 * i + 8), 16);
    if (reseeded) return; // the functions read what is there
    reseeded = true;
    replace(Math, 'random', () => function random() {
      return ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992; // 53 bits
    });
    const crypto = require('crypto');
    const bytesOf = (a) => new Uint8Array(a.buffer ?? a, a.byteOffset ?? 0, a.byteLength);
    const part = (a, offset = 0, size) => {
      const unit = a.BYTES_PER_ELEMENT ?? 1;
      return bytesOf(a).subarray(offset * unit, size === undefined ? undefined : (offset + size) * unit);
    };
    const fill = (a) => (fresh(bytesOf(a)), a);
    // later gives change the value that a callback would get.
    const later = (args, change) => {
      const f = args.at(-1);
      return typeof f === 'function' ? [...args.slice(0, -1), (e, value) => (e ? f(e) : f(e, change(value)))] : undefined;
    };
    replace(crypto, 'randomBytes', (old) => function randomBytes(...args) {
      const changed = later(args, fill);
      return changed ? old.apply(this, changed) : fill(old.apply(this, args));
    });
    replace(crypto, 'randomFillSync', (old) => function randomFillSync(a, offset, size) {
      old.apply(this, arguments);
      fresh(part(a, offset, size));
      return a;
    });
    replace(crypto, 'randomFill', (old) => function randomFill(a, ...rest) {
      const numbers = rest.slice(0, -1);
      return old.apply(this, later([a, ...rest], (b) => (fresh(part(b, ...numbers)), b)) ?? arguments);
    });
    replace(crypto, 'randomInt', (old) => function randomInt(...args) {
      const [min, max] = typeof args[1] === 'number' ? args : [0, args[0]];
      const draw = () => {
        const range = max - min, limit = 2 ** 48 - (2 ** 48 % range);
        for (;;) {
          const n = Buffer.from(fresh(new Uint8Array(6))).readUIntBE(0, 6);
          if (n < limit) return min + (n % range);
        }
      };
      const changed = later(args, draw);
      if (changed) return old.apply(this, changed);
      old.apply(this, args);
      return draw();
    });
    const uuid = () => {
      const b = Buffer.from(fresh(new Uint8Array(16)));
      b[6] = (b[6] & 0x0f) | 0x40;
      b[8] = (b[8] & 0x3f) | 0x80;
      return b.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-');
    };
    const newUUID = (old) => function randomUUID(...args) {
      old.apply(this, args);
      return uuid();
    };
    const newValues = (old) => function getRandomValues(a) {
      return fill(old.apply(this, arguments));
    };
    const web = crypto.webcrypto && Object.getPrototypeOf(crypto.webcrypto);
    for (const o of [crypto, web]) {
      replace(o, 'randomUUID', newUUID);
      replace(o, 'getRandomValues', newValues);
    }
    module_.syncBuiltinESMExports();
  }

  // next is sfc32, of PractRand: its last word counts.
  function next() {
    const g = generator;
    const t = (g[0] + g[1] + g[3]) >>> 0;
    g[3]++;
    g[0] = g[1] ^ (g[1] >>> 9);
    g[1] = g[2] + (g[2] << 3);
    g[2] = ((g[2] << 21) | (g[2] >>> 11)) + t;
    return t;
  }

  function replace(of, name, by) {
    const d = of && Object.getOwnPropertyDescriptor(of, name);
    if (d && d.configurable && typeof (d.value ?? d.get?.call(of)) === 'function') {
      Object.defineProperty(of, name, { value: by(of[name]), writable: true, enumerable: d.enumerable, configurable: true });
    }
  }

  for (const event of ['uncaughtException', 'unhandledRejection']) {
    process.on(event, (e) => process.stderr.write(`Uncaught ${failure(e).traceback.join('\n')}\n`));
  }
  globalThis.display = display;
  globalThis.require = module_.createRequire(path.join(process.cwd(), 'cell.js'));

  let pending = '';
  const channel = new net.Socket({ fd: CHANNEL, readable: true, writable: false });
  channel.setEncoding('utf8');
  channel.on('data', (text) => {
    pending += text;
    for (let i; (i = pending.indexOf('\n')) >= 0; ) {
      const line = pending.slice(0, i);
      pending = pending.slice(i + 1);
      if (secret === undefined) {
        secret = line;
        say({ type: 'ready' });
        continue;
      }
      const request = JSON.parse(line);
      if (request.settle) settle(request.settle);
      else if (request.interrupt) interrupt(request.interrupt);
      else if (request.reseed) reseed(request.reseed);
      else if (request.move) move(request.move);
      else cell(request);
    }
  });
  channel.on('end', () => process.exit(0));
})();
