package proxier

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
)

// wrapEditSelection recovers panics of Config.EditSelection and then uses its input
// unchanged: a bug in a hook must not stop the proxy.
func (c *Config) wrapEditSelection(log *zap.Logger) {
	edit := c.EditSelection
	if edit == nil {
		return
	}
	c.EditSelection = func(view changetracker.View, port *changetracker.ServicePort, s changetracker.Selection) (edited changetracker.Selection) {
		defer func() {
			if r := recover(); r != nil {
				log.Warn("hook of the embedding program panicked, and counts as not called", zap.String("hook", "EditSelection"), zap.Stringer("service", port.Name), zap.String("panic", fmt.Sprint(r)))
				edited = s
			}
		}()
		return edit(view, port, s)
	}
}
