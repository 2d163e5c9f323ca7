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
	"log/slog"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
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
