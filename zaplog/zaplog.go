// Package zaplog makes the *zap.Logger that this library takes out of the logger that a
// program has: a *slog.Logger or a logr.Logger. A program that has zap needs none of it.
// It works everywhere.
//
//	deps := proxier.Deps{Logger: zaplog.FromSlog(slog.Default())}
//
// Levels, fields, namespaces and the names of loggers arrive, and so does the place in
// the code that a line comes from, for handlers that show it. What the handler does not
// want is not even formatted.
//
// The other way, from zap, is well served: github.com/go-logr/zapr for logr, and with
// it klog's lines in a program's own logger, and go.uber.org/zap/exp/zapslog for slog.
// klog.SetLogger is for the program alone to call: it is global.
package zaplog

import (
	"log/slog"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
)

// FromSlog is a logger that writes to l; nil is silent. Debug, Info, Warn and Error are
// slog's levels of the same names. The name of a logger is the attribute "logger".
func FromSlog(l *slog.Logger) *zap.Logger {
	if l == nil {
		return zap.NewNop()
	}
	return fromHandler(l.Handler())
}

// FromLogr is a logger that writes to l; the zero value is silent. Debug is V(4), as
// Kubernetes has it and logr.ToSlogHandler, Info and Warn are V(0), and Error is an
// error. A logger of zapr is its zap.Logger again, with zap's own levels.
func FromLogr(l logr.Logger) *zap.Logger {
	// As zapr.Underlier. Its caller skips are for calls through logr.
	own, ok := l.GetSink().(interface{ GetUnderlying() *zap.Logger })
	if ok && l.GetV() == 0 {
		under := own.GetUnderlying()
		return zap.New(under.Core(), zap.AddCaller()).Named(under.Name())
	}
	return fromHandler(logr.ToSlogHandler(l))
}

func fromHandler(h slog.Handler) *zap.Logger { return zap.New(&core{handler: h}, zap.AddCaller()) }
