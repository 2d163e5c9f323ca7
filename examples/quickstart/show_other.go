//go:build !linux

package main

import (
	"context"
	"io"
)

func show(context.Context, io.Writer, objects, mode) error { return errCannotShow }
