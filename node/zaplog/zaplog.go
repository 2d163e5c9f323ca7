// Package zaplog creates the *zap.Logger that this library takes from a *slog.Logger or
// a logr.Logger. Programs that use zap do not need it.
//
//	deps := proxier.Deps{Logger: zaplog.FromSlog(slog.Default())}
//
// It keeps levels, fields, namespaces, logger names and the source position. Lines that
// the handler rejects are not formatted.
//
// For the other direction, from zap, there are github.com/go-logr/zapr for logr and
// klog, and go.uber.org/zap/exp/zapslog for slog. Only the program itself should call
// klog.SetLogger, which is global.
package zaplog

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// FromSlog returns a logger that writes to l; nil is silent. Levels keep their names.
// The logger's name becomes the attribute "logger".
func FromSlog(l *slog.Logger) *zap.Logger {
	if l == nil {
		return zap.NewNop()
	}
	return fromHandler(l.Handler())
}

// FromLogr returns a logger that writes to l; the zero value is silent. Debug becomes
// V(4), as in Kubernetes and logr.ToSlogHandler, Info and Warn become V(0), and Error an
// error. From a logger of zapr it returns the underlying zap.Logger.
func FromLogr(l logr.Logger) *zap.Logger {
	// This is zapr.Underlier. Its caller skips only suit calls through logr.
	own, ok := l.GetSink().(interface{ GetUnderlying() *zap.Logger })
	if ok && l.GetV() == 0 {
		under := own.GetUnderlying()
		return zap.New(under.Core(), zap.AddCaller()).Named(under.Name())
	}
	return fromHandler(logr.ToSlogHandler(l))
}

func fromHandler(h slog.Handler) *zap.Logger { return zap.New(&core{handler: h}, zap.AddCaller()) }

// core writes to a slog.Handler.
type core struct {
	handler slog.Handler
	// inside holds the fields from the first namespace on. Write adds them, because the
	// logger's name must come before the namespace.
	inside []zapcore.Field
}

// level converts a level of zap: both count in steps from Info.
func level(l zapcore.Level) slog.Level { return slog.Level(l) * (slog.LevelWarn - slog.LevelInfo) }

func (c *core) Enabled(l zapcore.Level) bool {
	return c.handler.Enabled(context.Background(), level(l)) //nolint:forbidigo // zap has none
}

func (c *core) With(fields []zapcore.Field) zapcore.Core {
	outside := 0
	if len(c.inside) == 0 {
		outside = slices.IndexFunc(fields, func(f zapcore.Field) bool { return f.Type == zapcore.NamespaceType })
		if outside < 0 {
			outside = len(fields)
		}
	}
	with := core{handler: c.handler, inside: slices.Concat(c.inside, fields[outside:])}
	if attrs := attributes(fields[:outside]); len(attrs) > 0 {
		with.handler = c.handler.WithAttrs(attrs)
	}
	return &with
}

func (c *core) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(entry.Level) {
		return checked.AddCore(entry, c)
	}
	return checked
}

func (c *core) Write(entry zapcore.Entry, fields []zapcore.Field) error {
	pc := entry.Caller.PC
	if pc != 0 {
		pc++ // zap stores the address of the call, slog expects the return address
	}
	record := slog.NewRecord(entry.Time, level(entry.Level), entry.Message, pc)
	if entry.LoggerName != "" {
		record.AddAttrs(slog.String("logger", entry.LoggerName))
	}
	record.AddAttrs(attributes(slices.Concat(c.inside, fields))...)
	if entry.Stack != "" {
		record.AddAttrs(slog.String("stacktrace", entry.Stack))
	}
	return c.handler.Handle(context.Background(), record) //nolint:forbidigo // zap has none
}

func (c *core) Sync() error { return nil }

// attributes converts fields. A namespace becomes a group of all fields after it.
func attributes(fields []zapcore.Field) []slog.Attr {
	attrs := make([]slog.Attr, 0, len(fields))
	for i, f := range fields {
		if f.Type == zapcore.NamespaceType {
			return append(attrs, slog.GroupAttrs(f.Key, attributes(fields[i+1:])...))
		}
		if f.Type == zapcore.ErrorType { // unchanged, since handlers may inspect it
			attrs = append(attrs, slog.Any(f.Key, f.Interface))
			continue
		}
		values := zapcore.NewMapObjectEncoder()
		f.AddTo(values)
		attrs = append(attrs, group(values.Fields)...)
	}
	return attrs
}

// group converts the fields of an object, sorted by name.
func group(fields map[string]any) []slog.Attr {
	attrs := make([]slog.Attr, 0, len(fields))
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		attrs = append(attrs, slog.Attr{Key: key, Value: value(fields[key])})
	}
	return attrs
}

func value(v any) slog.Value {
	switch v := v.(type) {
	case map[string]any:
		return slog.GroupValue(group(v)...)
	case complex64, complex128: // JSON has no complex numbers
		return slog.StringValue(strings.Trim(fmt.Sprint(v), "()"))
	}
	return slog.AnyValue(v)
}
