//go:build !linux

package nodedeps

import (
	"context"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// Surroundings returns a function that finds nothing.
func Surroundings(proxier.Config) func(context.Context, changetracker.Node) []proxier.Condition {
	return func(context.Context, changetracker.Node) []proxier.Condition { return nil }
}
