package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// run runs the proxy until ctx ends, or the cleanup.
func run(ctx context.Context, o *options, log *zap.Logger) error {
	o.warn(log)
	config, err := o.configOfNode(ctx, log)
	if err != nil {
		return err
	}
	node := config.Node.Name
	if err := checkPrivilege(); err != nil {
		return err
	}
	if o.program.OwnsProcess || o.oomScoreIsSet {
		o.adjustOOMScore(log)
	}
	if o.kubeProxy.initOnly {
		return o.initialize(ctx, config.Names.Instance, log)
	}
	measured, err := o.measure()
	if err != nil {
		return err
	}
	observed, endTraces, err := o.observed(ctx, node, measured, log)
	if err != nil {
		return err
	}
	defer endTraces()
	provider, err := o.provider(config, observed.Observer, log)
	if err != nil {
		return err
	}
	if o.cleanup {
		return o.cleanUpAll(ctx, provider, config, log)
	}
	tested, err := o.tested(provider, log)
	if err != nil {
		return err
	}
	measured.watch(o, tested, observed, config)
	source, err := o.source(node, provider, measured, log)
	if err != nil {
		return err
	}
	leaving, err := o.leaving(config, measured.registry, log)
	if err != nil {
		return err
	}
	o.logStart(node, config.Names.Instance, log)
	tasks := append(observed.tasks(provider, o.mode()), []task{
		{"proxy", provider.Run},
		{"source of Services", source},
		{"cleanup of other modes", o.cleanUpOtherModes(provider, leaving, config, log)},
		{"list of network namespaces", o.ebpf.namespaces.follow},
		{"canary", tested.runCanary},
	}...)
	if o.program.OwnsProcess {
		tasks = append(tasks, task{"return of memory", func(ctx context.Context) error { return returnMemory(ctx, provider) }})
	}
	err = runAll(ctx, append(tasks, o.servers(node, tested, measured, log)...))
	log.Info("stopped, the rules stay")
	return err
}

// logStart logs what starts.
func (o *options) logStart(node, instance string, log *zap.Logger) {
	o.logMode(log)
	o.logDetection(log)
	log.Info("starting", zap.String("version", version()), zap.String("mode", string(o.mode())), zap.String("node", node), zap.String("instance", instance))
}

// source returns the task that feeds the provider with Services.
func (o *options) source(node string, p proxier.Provider, m *measured, log *zap.Logger) (func(context.Context) error, error) {
	if o.manifests != "" {
		return manifestSource(o.manifests, node, p, log)
	}
	return o.apiSource(node, p, m, log)
}

// newLogger writes to stderr, in zap's console format or as JSON.
func newLogger(verbosity int, format string) *zap.Logger {
	const debug = 4 // kube-proxy's level of debug logs
	level := zapcore.InfoLevel
	if verbosity >= debug {
		level = zapcore.DebugLevel
	}
	if format == logJSON {
		return zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.Lock(os.Stderr), level))
	}
	encoding := zap.NewDevelopmentEncoderConfig()
	encoding.EncodeLevel = zapcore.CapitalLevelEncoder
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(encoding), zapcore.Lock(os.Stderr), level))
}

// task is a part of the program that runs until its context ends.
type task struct {
	name string
	run  func(context.Context) error
}

// runAll runs all tasks until ctx ends or one of them fails, and waits for all.
func runAll(ctx context.Context, tasks []task) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make([]error, len(tasks))
	var running sync.WaitGroup
	for i, t := range tasks {
		running.Go(func() {
			if err := t.run(ctx); err != nil {
				errs[i] = fmt.Errorf("run %s: %w", t.name, err)
				stop()
			}
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

// untilSynced waits for the first sync. It returns false if ctx ends first.
func untilSynced(ctx context.Context, p *proxier.Proxier) bool {
	for !p.Status().Synced {
		if !pause.For(ctx, 100*time.Millisecond) {
			return false
		}
	}
	return true
}

// returnMemory gives memory back to the system after the first sync, which needs more than all
// that follow: the collector alone would keep it for minutes.
func returnMemory(ctx context.Context, p *proxier.Proxier) error {
	if untilSynced(ctx, p) {
		debug.FreeOSMemory()
	}
	return nil
}

// lastFailure is the text of a failure, so that each new one is logged once; it is empty after a success.
type lastFailure string

// isNew takes the result of an attempt, and reports whether it is another failure than the last one.
func (l *lastFailure) isNew(err error) bool {
	before := *l
	if *l = ""; err != nil {
		*l = lastFailure(err.Error())
	}
	return err != nil && *l != before
}
