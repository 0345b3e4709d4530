package api

import (
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// show is spec.Sandbox with what is not in the record.
func (s *Server) show(r record.Record) wire.Sandbox {
	out := spec.Sandbox(r)
	if s.cfg.Health != nil {
		out.Sandboxd.Health = s.cfg.Health(r)
	}
	return out
}

func (s *Server) toInspection(r record.Record, host map[string]string) wire.Inspection {
	out := spec.Inspect(r)
	out.Sandbox, out.Host = s.show(r), host
	return out
}

func (s *Server) toImageInfo(i record.Image) wire.ImageInfo {
	return spec.Image(i, s.images.Aliases(i))
}
