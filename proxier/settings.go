package proxier

import (
	"context"
	"slices"

	"go.uber.org/zap"
)

// Settings are kernel settings that a proxy wants beside what its engine programs,
// such as the limits of connection tracking. Calls never overlap.
type Settings interface {
	// Apply brings the kernel to the settings, and returns what could not be set, as
	// conditions of type ConditionKernelSettings. Run calls it first, and again after
	// full syncs for as long as it returns some: a kernel module that a setting
	// belongs to may be loaded meanwhile.
	Apply(ctx context.Context) []Condition
	// Restore undoes what Apply has changed and nobody else has changed since.
	// Cleanup calls it.
	Restore(ctx context.Context) error
}

// applySettings never makes anything fail.
func (p *Proxier) applySettings(ctx context.Context) {
	if p.settings == nil {
		return
	}
	conditions := p.settings.Apply(ctx)
	p.mu.Lock()
	before := p.settingConditions
	for i := range conditions {
		if j := slices.IndexFunc(before, conditions[i].same); j >= 0 {
			conditions[i].Since = before[j].Since
		}
	}
	p.settingConditions = conditions
	p.mu.Unlock()
	for i := range conditions {
		if !slices.ContainsFunc(before, conditions[i].same) {
			p.log.Warn("kernel setting is not as it should be", zap.String("problem", conditions[i].Message))
		}
	}
}

// retrySettings applies the settings again after a full sync, if some could not be set.
func (p *Proxier) retrySettings(ctx context.Context) {
	p.mu.Lock()
	due := len(p.settingConditions) > 0 && p.fullDone
	p.fullDone = false
	p.mu.Unlock()
	if due {
		p.applySettings(ctx)
	}
}

// same says that both tell of the same thing.
func (c *Condition) same(o Condition) bool {
	return c.Type == o.Type && c.Family == o.Family && c.Message == o.Message
}
