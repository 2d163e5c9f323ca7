// Package invalid collects what is wrong with the Config of an engine, or with other options.
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

// Options are errors about options of a package.
type Options []error

// Check says what a field must be, unless it is.
func (o *Options) Check(ok bool, field string, value any, want string) {
	if !ok {
		*o = append(*o, fmt.Errorf("%s: %v: want %s", field, value, want))
	}
}
