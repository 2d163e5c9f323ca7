// Package invalid collects what is wrong with the Config of an engine.
package invalid

import (
	"fmt"

	"github.com/serviceplane/serviceplane/proxier"
)

// Fields are errors about fields. All that Add adds are proxier.ErrInvalidConfig.
type Fields []error

// Add says what is wrong with a field.
func (f *Fields) Add(field, format string, args ...any) {
	*f = append(*f, fmt.Errorf("%w: %s: %s", proxier.ErrInvalidConfig, field, fmt.Sprintf(format, args...)))
}
