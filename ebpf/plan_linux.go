package ebpf

import (
	"github.com/serviceplane/serviceplane/desired"
)

// Plan is for Abilities.
func (e *Engine) Plan(update desired.Update) (string, error) {
	rules, err := e.rules.Abilities().Plan(update)
	return e.config.Sockets.text(&update) + rules, err
}
