package zaplog_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/slogtest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/zapr"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/serviceplane/serviceplane/node/zaplog"
)

func Example() {
	program := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
	log := zaplog.FromSlog(program.With("program", "mine")) // this is a proxier.Deps.Logger
	log.Named("nftables").Warn("table was changed by another program", zap.Int("rules", 2), zap.Error(errors.New("busy")))
	log.Debug("not seen: the program's level is Info")
	// Output:
	// level=WARN msg="table was changed by another program" program=mine logger=nftables rules=2 error=busy
}

// plain is a logr.LogSink without support for slog. It writes lines like slog's JSON.
type plain struct {
	out    *bytes.Buffer
	max    int
	values []any
}

func (p *plain) Init(logr.RuntimeInfo)  {}
func (p *plain) Enabled(level int) bool { return level <= p.max }
func (p *plain) write(level, msg string, keysAndValues []any) {
	line := map[string]any{"level": level, "msg": msg}
	for i, all := 0, append(slices.Clip(p.values), keysAndValues...); i < len(all); i += 2 {
		line[all[i].(string)] = all[i+1]
		if err, ok := all[i+1].(error); ok {
			line[all[i].(string)] = err.Error()
		}
	}
	if err := json.NewEncoder(p.out).Encode(line); err != nil {
		panic(err)
	}
}
func (p *plain) Info(level int, msg string, kv ...any) { p.write(fmt.Sprint("V", level), msg, kv) }
func (p *plain) Error(_ error, msg string, kv ...any)  { p.write("ERROR", msg, kv) }
func (p *plain) WithValues(kv ...any) logr.LogSink {
	return &plain{p.out, p.max, append(p.values, kv...)}
}
func (p *plain) WithName(name string) logr.LogSink { return p.WithValues("logger", name) }
func jsonHandler(out *bytes.Buffer, level slog.Level) slog.Handler {
	return slog.NewJSONHandler(out, &slog.HandlerOptions{Level: level, AddSource: true})
}

// ways returns all ways from zap to JSON, for lines at level or above.
func ways() map[string]func(out *bytes.Buffer, level slog.Level) *zap.Logger {
	return map[string]func(out *bytes.Buffer, level slog.Level) *zap.Logger{
		"slog": func(out *bytes.Buffer, level slog.Level) *zap.Logger {
			return zaplog.FromSlog(slog.New(jsonHandler(out, level)))
		},
		"logr with slog": func(out *bytes.Buffer, level slog.Level) *zap.Logger {
			return zaplog.FromLogr(logr.FromSlogHandler(jsonHandler(out, level)))
		},
		"logr without slog": func(out *bytes.Buffer, level slog.Level) *zap.Logger {
			return zaplog.FromLogr(logr.New(&plain{out: out, max: int(-level)}))
		},
	}
}

// decode decodes one line of JSON, without time and source position.
func decode(t *testing.T, text []byte) map[string]any {
	t.Helper()
	var line map[string]any
	if err := json.Unmarshal(text, &line); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	for _, key := range []string{"time", "source", "level"} {
		delete(line, key)
	}
	return line
}

// flat returns a line without groups: "a": {"b": 1} becomes "a.b": 1.
func flat(line map[string]any) map[string]any {
	all := map[string]any{}
	for key, v := range line {
		inner, isGroup := v.(map[string]any)
		if !isGroup {
			all[key] = v
		}
		for name, v := range flat(inner) {
			all[key+"."+name] = v
		}
	}
	return all
}

type pod struct{ name string }

func (p pod) MarshalLogObject(e zapcore.ObjectEncoder) error {
	e.AddString("name", p.name)
	return e.AddObject("spec", zapcore.ObjectMarshalerFunc(func(e zapcore.ObjectEncoder) error {
		e.AddInt("weight", 3)
		return nil
	}))
}

// The expected result is zap's own JSON, for fields of a line and of its logger.
func TestEveryFieldArrivesAsZapWritesIt(t *testing.T) {
	now := time.Date(2026, 5, 4, 3, 2, 1, 987654321, time.UTC)
	cases := map[string][]zap.Field{
		"none":       nil,
		"skipped":    {zap.Skip(), zap.Error(nil)},
		"strings":    {zap.String("s", "x\n\""), zap.ByteString("b", []byte("bytes")), zap.Strings("list", []string{"a", "b"}), zap.Stringp("nil", nil)},
		"integers":   {zap.Int("i", -1), zap.Int8("i8", -8), zap.Int16("i16", 1), zap.Int32("i32", 2), zap.Int64("i64", -1<<52), zap.Ints("all", []int{1, 2})},
		"unsigned":   {zap.Uint("u", 1), zap.Uint8("u8", 8), zap.Uint16("u16", 1), zap.Uint32("u32", 2), zap.Uint64("u64", 1<<52), zap.Uintptr("p", 7)},
		"numbers":    {zap.Float32("f32", 0.5), zap.Float64("f64", 1e9), zap.Complex64("c64", 1+2i), zap.Complex128("c128", -2i), zap.Bool("yes", true)},
		"times":      {zap.Duration("d", time.Second), zap.Time("at", now), zap.Time("long ago", time.Time{}), zap.Durations("all", []time.Duration{1, 2})},
		"errors":     {zap.Error(errors.New("busy")), zap.NamedError("second", fmt.Errorf("wrap: %w", os.ErrNotExist))},
		"stringers":  {zap.Stringer("addr", netip.MustParseAddr("192.0.2.1")), zap.Any("any", time.Minute)},
		"binary":     {zap.Binary("raw", []byte{0, 1, 255})},
		"reflection": {zap.Any("map", map[string]int{"a": 1}), zap.Reflect("struct", struct{ A, B int }{1, 2}), zap.Any("nil", nil)},
		"objects":    {zap.Object("pod", pod{"a"}), zap.Inline(pod{"inline"}), zap.Objects("pods", []pod{{"a"}, {"b"}}), zap.Dict("dict", zap.Int("n", 1))},
		"namespaces": {zap.Int("outside", 1), zap.Namespace("a"), zap.Int("inside", 2), zap.Namespace("b"), zap.Object("pod", pod{"deep"})},
	}
	for name, fields := range cases {
		for split := range len(fields) + 1 { // the number of fields of the logger
			var model bytes.Buffer
			config := zap.NewProductionEncoderConfig()
			config.EncodeTime, config.EncodeDuration = zapcore.RFC3339NanoTimeEncoder, zapcore.NanosDurationEncoder
			config.TimeKey = zapcore.OmitKey
			say := func(log *zap.Logger) {
				log.Named("outer").With(fields[:split]...).Named("inner").Info("hello", fields[split:]...)
			}
			say(zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(config), zapcore.AddSync(&model), zap.DebugLevel)))
			for way, from := range ways() {
				t.Run(fmt.Sprint(name, "/", way, "/", split), func(t *testing.T) {
					var out bytes.Buffer
					say(from(&out, slog.LevelInfo))
					got, want := decode(t, out.Bytes()), decode(t, model.Bytes())
					if way == "logr without slog" {
						got, want = flat(got), flat(want)
					}
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("the line differs from zap's own (-want +got):\n%s", diff)
					}
				})
			}
		}
	}
}

// Levels are kept, and rejected lines are not formatted.
func TestLevels(t *testing.T) {
	cases := []struct {
		level      zapcore.Level
		slog, logr string
	}{
		{zap.DebugLevel - 1, "DEBUG-4", "V8"},
		{zap.DebugLevel, "DEBUG", "V4"},
		{zap.InfoLevel, "INFO", "V0"},
		{zap.WarnLevel, "WARN", "V0"},
		{zap.ErrorLevel, "ERROR", "ERROR"},
		{zap.DPanicLevel, "ERROR+4", "ERROR"},
	}
	for way, from := range ways() {
		for i, lowest := range []slog.Level{slog.LevelDebug - 4, slog.LevelDebug, slog.LevelInfo} {
			var out bytes.Buffer
			log := from(&out, lowest)
			for j, c := range cases {
				formatted := false
				out.Reset()
				log.Log(c.level, "hello", zap.Object("o", zapcore.ObjectMarshalerFunc(func(zapcore.ObjectEncoder) error {
					formatted = true
					return nil
				})))
				wanted := j >= i
				if log.Core().Enabled(c.level) != wanted || formatted != wanted || (out.Len() > 0) != wanted {
					t.Errorf("%s from %v on: %v is enabled %v, formatted %v, written %q, want %v", way, lowest, c.level,
						log.Core().Enabled(c.level), formatted, out.String(), wanted)
				}
				want := c.slog
				if way == "logr without slog" {
					want = c.logr
				}
				if wanted && !strings.Contains(out.String(), `"level":"`+want+`"`) {
					t.Errorf("%s: %v is %s, want level %s", way, c.level, out.String(), want)
				}
			}
		}
	}
}

// The source position is that of the call to zap.
func TestTheCallerIsKept(t *testing.T) {
	for way, from := range ways() {
		if way == "logr without slog" {
			continue // this sink counts frames itself
		}
		var out bytes.Buffer
		log := from(&out, slog.LevelInfo)
		_, _, line, _ := runtime.Caller(0)
		log.With(zap.Int("n", 1)).Info("hello")
		var got struct{ Source slog.Source }
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || got.Source.Line != line+1 || !strings.HasSuffix(got.Source.File, "zaplog_test.go") {
			t.Errorf("%s: the source is %+v, %v, want line %d here", way, got.Source, err, line+1)
		}
		out.Reset()
		log.WithOptions(zap.WithCaller(false)).Info("hello")
		if text := out.String(); strings.Contains(text, ".go") {
			t.Errorf("%s: without caller it wrote %s", way, text)
		}
		out.Reset()
		log.WithOptions(zap.AddStacktrace(zap.InfoLevel)).Info("hello")
		if text := out.String(); !strings.Contains(text, `"stacktrace":"github.com`) {
			t.Errorf("%s: with stack traces it wrote %s", way, text)
		}
	}
}

// This is slog's own test of handlers, from slog through zapr to zap and back.
func TestTheWholeWayAround(t *testing.T) {
	var out bytes.Buffer
	slogtest.Run(t, func(*testing.T) slog.Handler {
		out.Reset()
		return logr.ToSlogHandler(zapr.NewLogger(zaplog.FromSlog(slog.New(slog.NewJSONHandler(&out, nil)))))
	}, func(t *testing.T) map[string]any {
		var line map[string]any
		if err := json.Unmarshal(out.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		return line
	})
}

// FromLogr returns zapr's zap.Logger with its levels, fields, name and callers, unless
// its level was changed by V.
func TestALoggerOfZaprIsZapAgain(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	from := zapr.NewLogger(zap.New(core, zap.AddCaller())).WithName("program").WithValues("n", 1)
	zaplog.FromLogr(from).Named("nftables").Debug("hello", zap.Int("m", 2))
	zaplog.FromLogr(from.V(1)).Info("lowered")
	all := logs.AllUntimed()
	if len(all) != 2 || all[1].Level != zap.DebugLevel {
		t.Fatalf("log %v, want two lines at Debug", all)
	}
	if diff := cmp.Diff(map[string]any{"n": int64(1), "m": int64(2)}, all[0].ContextMap()); diff != "" {
		t.Errorf("the fields differ (-want +got):\n%s", diff)
	}
	if e := all[0].Entry; e.Level != zap.DebugLevel || e.LoggerName != "program.nftables" || !strings.HasSuffix(e.Caller.File, "zaplog_test.go") {
		t.Errorf("the entry is %+v, want program.nftables at Debug from here", e)
	}
}

func TestNoLoggerIsSilent(t *testing.T) {
	for name, log := range map[string]*zap.Logger{
		"slog": zaplog.FromSlog(nil), "logr": zaplog.FromLogr(logr.Logger{}), "discarded": zaplog.FromLogr(logr.Discard()),
		"slog discarded": zaplog.FromSlog(slog.New(slog.DiscardHandler)),
	} {
		log.Named("a").With(zap.Int("n", 1)).Error("hello")
		if log.Core().Enabled(zap.ErrorLevel) {
			t.Errorf("%s: it is enabled", name)
		}
	}
}

type failing struct{ slog.Handler }

func (failing) Handle(context.Context, slog.Record) error { return errors.New("disk full") }

// A handler's error goes to zap's error output.
func TestAFailureIsReported(t *testing.T) {
	var complaints bytes.Buffer
	log := zaplog.FromSlog(slog.New(failing{slog.NewTextHandler(&complaints, nil)}))
	log.WithOptions(zap.ErrorOutput(zapcore.AddSync(&complaints))).Info("hello")
	if !strings.Contains(complaints.String(), "disk full") {
		t.Errorf("zap complains with %q, want the handler's error", complaints.String())
	}
}
