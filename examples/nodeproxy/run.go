package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// run is the proxy, or its clean-up, until ctx ends.
func run(ctx context.Context, o *options) error {
	log := newLogger(o.verbosity)
	node, err := o.nodeName()
	if err != nil {
		return err
	}
	config, err := o.config(node)
	if err != nil {
		return err
	}
	if err := checkPrivilege(); err != nil {
		return err
	}
	observer := newMetrics()
	provider, err := nftables.New(config, proxier.Deps{Logger: log, Observer: observer})
	if err != nil {
		return err
	}
	kernel := newSysctls("/", o.stateDir, config.Names.Instance, log)
	if o.cleanup {
		return cleanUp(ctx, provider, kernel)
	}
	source, err := o.source(node, provider, log)
	if err != nil {
		return err
	}
	kernel.apply(o.conntrack.settings(kernel.cpus()))
	log.Info("starting", zap.String("node", node), zap.String("instance", config.Names.Instance))
	tasks := []task{{"proxy", provider.Run}, {"source of Services", source}}
	tasks = append(tasks, o.servers(provider, observer, log)...)
	err = runAll(ctx, tasks)
	log.Info("ended; the rules stay")
	return err
}

// source is what tells the provider of Services.
func (o *options) source(node string, p proxier.Provider, log *zap.Logger) (func(context.Context) error, error) {
	if o.manifests != "" {
		return manifestSource(o.manifests, node, p, log)
	}
	return o.apiSource(node, p, log)
}

// servers are those of health and of metrics.
func (o *options) servers(p proxier.Provider, m *metrics, log *zap.Logger) []task {
	var tasks []task
	if address, _ := bindAddress(o.healthzAddress, 10256); address != "" {
		h := &health{status: p.Status, timeout: 2 * o.syncPeriod, answered: m.answered}
		tasks = append(tasks, task{"health server", (&server{"health", address, h.handler(), log}).run})
	}
	if address, _ := bindAddress(o.metricsAddress, 10249); address != "" {
		tasks = append(tasks, task{"metrics server", (&server{"metrics", address, m.handler(), log}).run})
	}
	return tasks
}

// cleanUp removes what this instance has made in the kernel. One part's failure
// does not keep the other from being cleaned up.
func cleanUp(ctx context.Context, p proxier.Provider, s *sysctls) error {
	return errors.Join(p.Cleanup(ctx), s.restore())
}

// newLogger writes for people, to stderr.
func newLogger(verbosity int) *zap.Logger {
	const debug = 4 // kube-proxy's level for what only a developer wants to know
	level := zapcore.InfoLevel
	if verbosity >= debug {
		level = zapcore.DebugLevel
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
