package api

import (
	"context"
	"fmt"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
)

// withAuth has ctx carry the credentials that came for an image.
func withAuth(ctx context.Context, i *wire.Image) context.Context {
	if i == nil || i.Auth == nil {
		return ctx
	}
	return image.WithAuth(ctx, &image.Auth{Username: i.Auth.Username, Password: i.Auth.Password})
}

// pullImage gets an image from a registry. It streams as an import does. What
// was downloaded before a client left is kept for the next pull.
func (s *Server) pullImage(w http.ResponseWriter, r *http.Request) error {
	var req wire.PullRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := spec.CheckAuth("auth", req.Auth); err != nil {
		return err
	}
	infoOf(r).op, infoOf(r).image = opImagePull, httperr.Clip(req.Name, 200)
	said := &teller{w: w, rc: http.NewResponseController(w), done: make(chan struct{})}
	said.going.Go(said.tell)
	ctx := withAuth(r.Context(), &wire.Image{Auth: req.Auth})
	im, err := s.images.Pull(ctx, image.Pull{Name: req.Name}, said.note)
	close(said.done)
	said.going.Wait()
	if err == nil {
		out := s.toImageInfo(im)
		said.line(wire.ImportLine{Image: &out})
		return nil
	}
	err = httperr.Recode(fmt.Errorf("pull image %q: %w", httperr.Clip(req.Name, 200), err), errs.NotFound, "IMAGE::NOT_FOUND")
	if !infoOf(r).wrote {
		return err
	}
	infoOf(r).err = err
	_, body := httperr.Body(err, infoOf(r).requestID)
	said.line(wire.ImportLine{Error: &body})
	return nil
}
