package proxier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/desired"
)

// Rules returns what the engine of each IP family programs for one Service, in words of
// the engine's own tools: what Plan of its Abilities prints for the programmed State with this Service
// alone, without what it prints for no Service. In the kernel, a Service among others has the
// same elements and rules, but iptables may have them in further chains, and numbers may differ.
//
// A family is missing if the Service is not programmed in it, or if its engine has no Plan.
// The error wraps ErrNotProgrammed if no family has been programmed, and
// errors.ErrUnsupported if the Service is programmed but no engine can plan.
func (p *Proxier) Rules(ctx context.Context, name types.NamespacedName) (map[v1.IPFamily]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	rules, programmed, unsupported := map[v1.IPFamily]string{}, false, false
	for _, f := range p.families {
		now := f.current()
		if now.state == nil {
			continue
		}
		programmed = true
		update := now.only(name)
		if len(update.Changes) == 0 {
			continue
		}
		text, err := f.planOf(&update)
		switch {
		case errors.Is(err, errors.ErrUnsupported):
			unsupported = true
		case err != nil:
			return nil, fmt.Errorf("rules of %s: %w", f.name, err)
		default:
			rules[f.name] = text
		}
	}
	switch {
	case !programmed:
		return nil, fmt.Errorf("rules: %w", ErrNotProgrammed)
	case unsupported && len(rules) == 0:
		return nil, fmt.Errorf("rules: %w by the engine", errors.ErrUnsupported)
	default:
		return rules, nil
	}
}

func (f *family) current() programmed {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.programmed
}

// only returns the full Update with one Service.
func (p *programmed) only(name types.NamespacedName) desired.Update {
	now := desired.NewResolved(p.state, p.resolver, p.globals)
	u := desired.Update{Family: p.state.Family(), Full: true, Was: now, Now: now, Globals: p.globals}
	for _, port := range p.state.ServicePorts(name) {
		if s, ok := now.Service(port); ok {
			u.Changes = append(u.Changes, desired.ChangesTo(s)...)
		}
	}
	return u
}

// planOf is the plan of an Update without what is in the plan of no Service.
func (f *family) planOf(u *desired.Update) (string, error) {
	if f.can.Plan == nil {
		return "", errors.ErrUnsupported
	}
	whole, err := f.can.Plan(*u)
	if err != nil {
		return "", err
	}
	empty := *u
	empty.Changes = nil
	fixed, err := f.can.Plan(empty)
	return added(whole, fixed), err
}

// added returns the lines of text that fixed does not have, below the headings of theirs that
// it has too: "table … {", "*nat", "# engine".
func added(text, fixed string) string {
	left := map[string]int{}
	for line := range strings.Lines(fixed) {
		left[line]++
	}
	var b strings.Builder
	var above []string // the headings that are not written yet
	for line := range strings.Lines(text) {
		depth := depthOf(line)
		above = slices.DeleteFunc(above, func(h string) bool { return depthOf(h) >= depth })
		if left[line]--; left[line] >= 0 {
			above = append(above, line)
			continue
		}
		for _, h := range above {
			b.WriteString(h)
		}
		above = nil
		b.WriteString(line)
	}
	return b.String()
}

// depthOf is how deep a line of a plan is below headings.
func depthOf(line string) int {
	switch {
	case strings.HasPrefix(line, "# "):
		return 0
	case strings.HasPrefix(line, "*"):
		return 1
	default:
		return 2 + len(line) - len(strings.TrimLeft(line, "\t"))
	}
}
