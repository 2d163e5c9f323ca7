package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// plan prints what the engine would program. It needs no privilege.
func plan(ctx context.Context, out io.Writer, all objects, m mode) error {
	planners := map[v1.IPFamily]proxier.Engine{}
	for _, family := range families() {
		engine, err := m.engine(all.config(), family)
		if err != nil {
			return err
		}
		if engine.Abilities().Plan == nil {
			return fmt.Errorf("engine for %s cannot plan", family)
		}
		planners[family] = &planning{Engine: engine}
	}
	p, err := proxier.New(all.config(), proxier.Deps{}, planners)
	if err != nil {
		return err
	}
	all.feed(p)
	if err := running(ctx, p, p.Sync); err != nil {
		return err
	}
	for _, family := range families() {
		if engine, ok := planners[family].(*planning); ok {
			if _, err := fmt.Fprintf(out, "# %s\n%s\n", family, strings.TrimSpace(engine.plan())); err != nil {
				return err
			}
		}
	}
	return nil
}

// planning is an engine that only plans.
type planning struct {
	proxier.Engine

	mu   sync.Mutex
	text string // guarded by mu
}

// Abilities implements proxier.Engine. It owns no names and watches nothing, so that another process may have them.
func (p *planning) Abilities() proxier.Abilities {
	return proxier.Abilities{Plan: p.Engine.Abilities().Plan}
}

// Apply implements proxier.Engine. The first update is full, and contains everything. The
// call of Sync may cause a second one, without changes.
func (p *planning) Apply(_ context.Context, update desired.Update) (proxier.Result, error) {
	if !update.Full {
		return proxier.Result{}, nil
	}
	text, err := p.Abilities().Plan(update)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = text
	return proxier.Result{}, err
}

func (p *planning) plan() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text
}
