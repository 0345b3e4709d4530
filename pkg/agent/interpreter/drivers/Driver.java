// The java driver of a context: it reads cells from the agent, has JShell
// evaluate them in this process, and answers with frames. A frame is a line of
// the context's secret and a JSON object, with an empty line before it: see
// python.py. The agent gives it to the java of the image as source; the compiler
// that is loaded for that is JShell's, too.

import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.File;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.FilterOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Random;
import java.util.SplittableRandom;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicLong;
import jdk.jshell.DeclarationSnippet;
import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.JShellException;
import jdk.jshell.Snippet;
import jdk.jshell.Snippet.Status;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis.CompletionInfo;
import jdk.jshell.UnresolvedReferenceException;

public class Driver {
    static final int CHANNEL = 3;
    static final int MAX_TEXT = 1 << 20; // characters
    static final int MAX_TRACE = 1000; // lines

    // What the jshell tool imports by default.
    static final String[] IMPORTS = {
        "java.io", "java.math", "java.net", "java.nio.file", "java.util", "java.util.concurrent",
        "java.util.function", "java.util.prefs", "java.util.regex", "java.util.stream",
    };

    static final int RESEED = -2; // the number of a cell that is a seed and no code

    /** A call of code: the number of the call, and the text. */
    static class Cell {
        final int count;
        final String code;

        Cell(int count, String code) {
            this.count = count;
            this.code = code;
        }
    }

    /** Where a snippet was: its cell, and the lines before it there. */
    static class Place {
        final Cell cell;
        final int line;

        Place(Cell cell, int line) {
            this.cell = cell;
            this.line = line;
        }
    }

    /** How a cell failed. */
    static class Failure extends Exception {
        final String name;
        final String value;
        final List<String> traceback;

        Failure(String name, String value, List<String> traceback) {
            super(value, null, false, false);
            this.name = name;
            this.value = value;
            this.traceback = traceback;
        }
    }

    final LinkedBlockingQueue<Cell> cells = new LinkedBlockingQueue<>();
    final Map<String, Place> places = new HashMap<>(); // by the ids of snippets
    final OutputStream channel;
    final DataInputStream requests;
    final String secret;
    JShell shell;
    PrintStream[] streams = {null, stream(FileDescriptor.out), stream(FileDescriptor.err)};
    Cell running; // guarded by this
    volatile int interrupted; // the last cell that was

    Driver() throws Exception {
        // No stream of Java's leads to a socket that was inherited.
        FileDescriptor fd = new FileDescriptor();
        Field number = FileDescriptor.class.getDeclaredField("fd");
        number.setAccessible(true);
        number.setInt(fd, CHANNEL);
        channel = new FileOutputStream(fd);
        requests = new DataInputStream(new BufferedInputStream(new FileInputStream(fd)));
        secret = requests.readLine();
    }

    /** Code can close it, but not what it leads to. */
    static PrintStream stream(FileDescriptor fd) {
        OutputStream open = new FilterOutputStream(new BufferedOutputStream(new FileOutputStream(fd), 8192)) {
            @Override
            public void write(byte[] b, int off, int len) throws IOException {
                out.write(b, off, len);
            }

            @Override
            public void close() throws IOException {
                flush();
            }
        };
        try {
            return new PrintStream(open, true, "UTF-8");
        } catch (IOException e) {
            throw new AssertionError(e); // every Java knows it
        }
    }

    /**
     * Opens the streams that code has closed, or all of them. What it redirected stays so. A thread that was stopped
     * while it wrote has left behind what it wrote: that would be written again.
     */
    void openStreams(boolean all) {
        for (int i = 1; i <= 2; i++) {
            PrintStream now = i == 1 ? System.out : System.err;
            boolean ours = now == null || now == streams[i];
            if (all || closed(streams[i])) {
                streams[i] = stream(i == 1 ? FileDescriptor.out : FileDescriptor.err);
            }
            if (ours) {
                set(i);
            }
        }
    }

    static boolean closed(PrintStream s) {
        s.write(new byte[0], 0, 0); // fails if it is
        return s.checkError();
    }

    void set(int i) {
        if (i == 1) {
            System.setOut(streams[i]);
        } else {
            System.setErr(streams[i]);
        }
    }

    // Frames.

    static String json(String s) {
        StringBuilder b = new StringBuilder("\"");
        for (int i = 0; i < s.length(); i++) {
            char c = s.charAt(i);
            if (c == '"' || c == '\\') {
                b.append('\\').append(c);
            } else if (c < ' ' || Character.isSurrogate(c) || c == 0x7f) {
                b.append(String.format("\\u%04x", (int) c));
            } else {
                b.append(c);
            }
        }
        return b.append('"').toString();
    }

    /** Sends a frame, after all that was printed before it. */
    synchronized void say(String frame) throws IOException {
        for (PrintStream s : List.of(streams[1], streams[2])) {
            s.flush(); // what code redirected is not ours to flush
        }
        channel.write(("\n" + secret + frame + "\n").getBytes(StandardCharsets.UTF_8));
    }

    static String cut(String s) {
        return s.length() <= MAX_TEXT ? s : s.substring(0, MAX_TEXT) + "… (" + s.length() + " characters in all)";
    }

    void done(Failure f) throws IOException {
        if (f == null) {
            say("{\"type\":\"done\"}");
            return;
        }
        StringBuilder lines = new StringBuilder();
        for (String line : f.traceback.subList(0, Math.min(f.traceback.size(), MAX_TRACE))) {
            lines.append(lines.length() == 0 ? "" : ",").append(json(cut(line)));
        }
        say("{\"type\":\"done\",\"error\":{\"ename\":" + json(f.name) + ",\"evalue\":" + json(cut(f.value)) + ",\"traceback\":[" + lines + "]}}");
    }

    // Cells.

    static int linesIn(String s) {
        return (int) s.chars().filter(c -> c == '\n').count();
    }

    /** Evaluates a cell, and returns the value of its last expression, or null. */
    String evaluate(Cell cell) throws Failure {
        String value = null;
        String rest = cell.code;
        while (!(rest = rest.stripLeading()).isEmpty()) { // JShell counts lines without those
            if (interrupted == cell.count) {
                throw stopped();
            }
            CompletionInfo info = shell.sourceCodeAnalysis().analyzeCompletion(rest);
            String source = info.completeness().isComplete() ? info.source() : rest;
            int before = linesIn(cell.code.substring(0, cell.code.length() - rest.length()));
            rest = info.completeness().isComplete() ? info.remaining() : "";
            if (source.isBlank()) {
                continue; // an end of comments
            }
            value = null;
            for (SnippetEvent e : shell.eval(source)) {
                if (e.causeSnippet() == null) { // the snippet itself, not one that depends on it
                    places.put(e.snippet().id(), new Place(cell, before));
                    check(e, cell, before);
                    value = valueOf(e);
                }
            }
        }
        return value;
    }

    static String valueOf(SnippetEvent e) {
        boolean expression = e.snippet().kind() == Snippet.Kind.EXPRESSION && e.snippet().subKind() != Snippet.SubKind.ASSIGNMENT_SUBKIND
            || e.snippet().subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
        return !expression || e.value() == null || e.value().isEmpty() ? null : e.value();
    }

    /** Throws a Failure if a snippet failed, and warns of one that cannot be used yet. */
    void check(SnippetEvent e, Cell cell, int before) throws Failure {
        if (interrupted == cell.count && e.value() == null && e.exception() == null && e.status() != Status.REJECTED && e.snippet().kind() != Snippet.Kind.METHOD) {
            throw stopped();
        }
        if (e.status() == Status.REJECTED) {
            throw wrong(e.snippet(), cell, before);
        }
        if (e.exception() instanceof EvalException) {
            if (interrupted == cell.count || ((EvalException) e.exception()).getExceptionClassName().equals("java.lang.ThreadDeath")) {
                throw stopped();
            }
            List<String> trace = new ArrayList<>();
            trace(trace, (EvalException) e.exception(), "");
            throw new Failure("EvalException", say((EvalException) e.exception()), trace);
        }
        if (e.exception() instanceof UnresolvedReferenceException) {
            DeclarationSnippet s = ((UnresolvedReferenceException) e.exception()).getSnippet();
            String missing = missing(s);
            throw new Failure("UnresolvedReferenceException", missing, List.of("UnresolvedReferenceException: " + missing));
        }
        if (e.status() == Status.RECOVERABLE_DEFINED || e.status() == Status.RECOVERABLE_NOT_DEFINED) {
            System.err.println(missing((DeclarationSnippet) e.snippet()));
        }
    }

    String missing(DeclarationSnippet s) {
        List<String> needs = new ArrayList<>();
        shell.unresolvedDependencies(s).forEach(needs::add);
        shell.diagnostics(s).filter(Diag::isError).forEach(d -> needs.add(d.getMessage(Locale.ROOT).split("\n", 2)[0]));
        return s.name() + " cannot be used until this is fixed: " + String.join(", ", needs);
    }

    /** A compile error, with the lines of the cell that it is in. */
    Failure wrong(Snippet s, Cell cell, int before) {
        List<String> lines = new ArrayList<>();
        String first = null;
        for (Diag d : (Iterable<Diag>) shell.diagnostics(s)::iterator) {
            if (!d.isError()) {
                continue;
            }
            int at = (int) Math.max(0, Math.min(d.getPosition(), s.source().length()));
            int begin = s.source().lastIndexOf('\n', at - 1) + 1;
            String text = s.source().substring(begin).split("\n", 2)[0];
            String message = "<cell " + cell.count + ">:" + (before + linesIn(s.source().substring(0, at)) + 1) + ": " + d.getMessage(Locale.ROOT);
            first = first == null ? message : first;
            lines.addAll(List.of(message.split("\n")));
            lines.add("    " + text);
            lines.add("    " + " ".repeat(at - begin) + "^");
        }
        return new Failure("CompilationException", first == null ? "this is not valid Java" : first, lines);
    }

    static String say(EvalException e) {
        return e.getMessage() == null ? e.getExceptionClassName() : e.getExceptionClassName() + ": " + e.getMessage();
    }

    void trace(List<String> lines, JShellException thrown, String caused) {
        lines.add(caused + (thrown instanceof EvalException ? say((EvalException) thrown) : thrown.toString()));
        for (StackTraceElement f : thrown.getStackTrace()) {
            String file = f.getFileName() == null ? "" : f.getFileName();
            Place p = file.startsWith("#") ? places.get(file.substring(1)) : null;
            String where = p == null ? file + ":" + f.getLineNumber() : "<cell " + p.cell.count + ">:" + (p.line + f.getLineNumber());
            String name = (f.getClassName().isEmpty() ? "" : f.getClassName() + ".") + f.getMethodName();
            lines.add("    at " + (name.isEmpty() ? where : name + " (" + where + ")"));
        }
        if (thrown.getCause() instanceof JShellException && lines.size() < MAX_TRACE) {
            trace(lines, (JShellException) thrown.getCause(), "Caused by: ");
        }
    }

    static Failure stopped() {
        return new Failure("KeyboardInterrupt", "the code was interrupted", List.of("KeyboardInterrupt: the code was interrupted"));
    }

    void run(Cell cell) throws IOException {
        openStreams(false);
        Failure failure = null;
        try {
            now(cell);
            String value = evaluate(cell);
            if (value != null && interrupted != cell.count) { // a thread that was stopped twice leaves null
                say("{\"type\":\"result\",\"results\":{\"text\":" + json(cut(value)) + "}}");
            }
        } catch (Failure f) {
            failure = f;
        } catch (Throwable t) { // of JShell itself: the heap is full, a class is too large
            failure = new Failure(t.getClass().getName(), String.valueOf(t.getMessage()), List.of(t.toString()));
        }
        now(null);
        if (interrupted == cell.count) {
            openStreams(true);
            failure = stopped();
        }
        done(failure);
    }

    synchronized void now(Cell cell) {
        running = cell;
    }

    /** Stops a cell: again and again, because JShell does not note what comes before code runs. */
    void interrupt(int count) {
        interrupted = count;
        Thread t = new Thread(() -> {
            for (boolean first = true;; first = false) {
                synchronized (this) {
                    if (running == null ? !first : running.count != count) {
                        return;
                    }
                    shell.stop();
                }
                try {
                    Thread.sleep(100);
                } catch (InterruptedException e) {
                    return;
                }
            }
        });
        t.setDaemon(true);
        t.start();
    }

    /**
     * Has code draw other random numbers: this process is a copy of one that goes on. SecureRandom reads the kernel's.
     * What code has made by itself, as by new Random(), stays as it is.
     */
    static void reseed(long seed) {
        SplittableRandom random = new SplittableRandom(seed ^ new SecureRandom().nextLong());
        for (String holder : new String[] {"java.lang.Math$RandomNumberGeneratorHolder", "java.lang.StrictMath$RandomNumberGeneratorHolder"}) {
            change(holder, "randomNumberGenerator", f -> ((Random) f.get(null)).setSeed(random.nextLong()));
        }
        change("java.util.Collections", "r", f -> {
            if (f.get(null) != null) { // of shuffle
                ((Random) f.get(null)).setSeed(random.nextLong());
            }
        });
        for (String[] from : new String[][] { // the next ones that are made
            {"java.util.Random", "seedUniquifier"}, {"java.util.SplittableRandom", "defaultGen"},
            {"java.util.concurrent.ThreadLocalRandom", "seeder"},
        }) {
            change(from[0], from[1], f -> ((AtomicLong) f.get(null)).set(random.nextLong()));
        }
        for (Thread t : Thread.getAllStackTraces().keySet()) {
            change("java.lang.Thread", "threadLocalRandomSeed", f -> f.setLong(t, random.nextLong()));
        }
    }

    interface Change {
        void of(Field f) throws ReflectiveOperationException;
    }

    /** Changes a field that this JDK may have. */
    static void change(String of, String name, Change c) {
        try {
            Field f = Class.forName(of).getDeclaredField(name);
            f.setAccessible(true);
            c.of(f);
        } catch (ReflectiveOperationException | RuntimeException | LinkageError e) {
            return; // it has another
        }
    }

    void serve() {
        try {
            for (String name : IMPORTS) {
                shell.eval("import " + name + ".*;");
            }
            shell.sourceCodeAnalysis().analyzeCompletion("0");
            for (;;) {
                Cell cell = cells.take();
                if (cell.count == RESEED) {
                    reseed(Long.parseUnsignedLong(cell.code, 16));
                } else {
                    run(cell);
                }
            }
        } catch (Throwable t) {
            t.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    // A class whose initialization is interrupted cannot be used in this JVM any more. That
    // of these takes milliseconds, when code starts its first process; here nothing
    // interrupts it. A JDK that lacks one has another.
    static void initializeProcesses() {
        for (String name : new String[] {
            "java.lang.ProcessHandleImpl", "java.lang.ProcessImpl", "java.lang.ProcessEnvironment",
            "java.lang.ProcessImpl$1", "java.util.concurrent.CompletableFuture", "java.util.concurrent.ForkJoinTask",
        }) {
            try {
                Class.forName(name);
            } catch (ClassNotFoundException | LinkageError e) {
                continue;
            }
        }
    }

    void start() throws Exception {
        set(1);
        set(2);
        initializeProcesses();
        shell = JShell.builder().executionEngine("local").in(System.in).out(System.out).err(System.err).build();
        for (String path : String.valueOf(System.getenv("CLASSPATH")).split(File.pathSeparator)) {
            if (new File(path).exists()) {
                shell.addToClasspath(path);
            }
        }
        Thread server = new Thread(null, this::serve, "cells", 16 << 20);
        server.setDaemon(true);
        server.start();
        say("{\"type\":\"ready\"}");
        // Here, and not where code runs: the end of the channel is seen while code does.
        for (String line; (line = requests.readLine()) != null; ) {
            String[] numbers = line.split(" ");
            int count = Integer.parseInt(numbers[0]);
            int size = Integer.parseInt(numbers[1]);
            if (size == RESEED) {
                cells.add(new Cell(RESEED, numbers[2]));
                continue;
            }
            if (size < 0) {
                interrupt(count);
                continue;
            }
            byte[] code = new byte[size];
            requests.readFully(code);
            cells.add(new Cell(count, new String(code, StandardCharsets.UTF_8)));
        }
    }

    public static void main(String[] args) {
        int status = 0;
        try {
            new Driver().start();
        } catch (Throwable t) {
            t.printStackTrace();
            status = 1;
        }
        Runtime.getRuntime().halt(status);
    }
}
