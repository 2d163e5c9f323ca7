// Package errtree tells failures of single things from failures of everything, in
// errors that wrap and join others.
package errtree

import "errors"

// Split walks the tree of err. known says whether one error is of the wanted kind; what
// such an error wraps does not matter. found are all of that kind. rest is nil only if
// each leaf is or belongs to one of them: errors.As would find one and overlook what is
// joined with it.
//
// A nil among joined errors is no failure. An error that wraps nothing, or only nil,
// is a leaf.
func Split[T any](err error, known func(error) (T, bool)) (found []T, rest error) {
	if err == nil {
		return nil, nil
	}
	if one, ok := known(err); ok {
		return []T{one}, nil
	}
	var others []error
	leaf := true
	for _, e := range children(err) {
		more, other := Split(e, known)
		found, others = append(found, more...), append(others, other)
		leaf = leaf && e == nil
	}
	switch rest := errors.Join(others...); {
	case leaf:
		return found, err
	case rest == nil:
		return found, nil
	default:
		return found, withWords(err, rest)
	}
}

// withWords keeps what err says beside what it wraps.
func withWords(err, rest error) error {
	if _, joined := err.(interface{ Unwrap() []error }); joined {
		return rest
	}
	return err
}

func children(err error) []error {
	switch e := err.(type) { //nolint:errorlint // walks the tree itself
	case interface{ Unwrap() error }:
		return []error{e.Unwrap()}
	case interface{ Unwrap() []error }:
		return e.Unwrap()
	}
	return nil
}

// As says whether err itself is a T. It is a known for Split.
func As[T error](err error) (T, bool) {
	e, ok := err.(T) //nolint:errorlint // Split walks the tree
	return e, ok
}
