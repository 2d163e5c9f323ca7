// Package enum names the values of enumerations, including unknown ones.
package enum

import "strconv"

// Name returns the name of v. The names begin with that of the zero value. A value without a
// name is "unknown_9", for instance, which is fit for people and for a metric label.
func Name[T ~uint8](v T, names ...string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return "unknown_" + strconv.Itoa(int(v))
}
