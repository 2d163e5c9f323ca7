package proxier

import (
	"errors"
	"strings"
	"testing"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

func TestTrackerOptionsThatAreOverwrittenAreRefused(t *testing.T) {
	for field, options := range map[string]changetracker.Options{
		"Families": {Families: []v1.IPFamily{v1.IPv4Protocol}},
		"Node":     {Node: changetracker.Node{Draining: "tainted"}},
		"Logger":   {Logger: zap.NewNop()},
		"":         {StrictSourceRanges: true, LoopbackEndpoints: true},
	} {
		err := Config{Tracker: options}.WithDefaults().Validate()
		if field == "" && err == nil {
			continue
		}
		if !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), "Tracker."+field+": is set") {
			t.Errorf("%q: Validate = %v", field, err)
		}
	}
}
